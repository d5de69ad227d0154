// Memory on cache-line borders, with huge pages as a hint for large tables.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>

namespace dslide {

// Asks for `bytes` from `first` on, soon to be read or written, as far as the second cache: what is asked for into the first
// one takes up its few outstanding misses, which then wait on each other. A macro's worth of inlining: GCC takes a function
// that only prefetches for one without effects and drops calls of it.
__attribute__((always_inline)) inline void prefetch(const void* first, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(first) + at, 1, 2);
}

// Asks for one line of each page: where the CPU has to look the page up, a request holds up all that follows it, the next
// row's look-up, too, unless that comes right behind. So rows on pages of their own are best touched several in a row, some
// time before they are asked for whole.
__attribute__((always_inline)) inline void touch(const void* first, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 4096) __builtin_prefetch(static_cast<const char*>(first) + at, 1, 2);
}

// A zeroed, fixed-size array of a trivial type, aligned to 64 bytes (2 MiB above 4 MiB).
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size) { reset(size); }

  void reset(std::size_t size) {
    const std::size_t align = size * sizeof(T) >= kLarge ? kHuge : 64;
    const std::size_t bytes = (size * sizeof(T) + align - 1) / align * align;
    void* memory = std::aligned_alloc(align, bytes ? bytes : align);
    if (memory == nullptr) throw std::bad_alloc();
    data_.reset(static_cast<T*>(memory));
    if (align == kHuge) madvise(memory, bytes, MADV_HUGEPAGE);  // only a hint: failure costs nothing but speed
    std::memset(memory, 0, bytes);
    size_ = size;
  }

  // Has that size from then on; the content stays only if it had it before.
  void fit(std::size_t size) {
    if (size != size_) reset(size);
  }

  // Grows without keeping the content; never shrinks.
  T* at_least(std::size_t size) {
    if (size > size_) reset(size + size / 4);
    return data_.get();
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }

 private:
  static constexpr std::size_t kLarge = std::size_t{4} << 20, kHuge = std::size_t{2} << 20;
  struct Free {
    void operator()(T* memory) const { std::free(memory); }
  };
  std::unique_ptr<T[], Free> data_;
  std::size_t size_ = 0;
};

}  // namespace dslide
