// Packing for the matrix product: the right-hand side as panels of `nr` columns.
#pragma once

#include <cstddef>
#include <functional>

#include "buffer.hpp"
#include "kernels.hpp"

namespace dslide {

// A product calls it before each of its `parts` tiles, to ask for memory that is wanted after it: a few lines at a time
// arrive while the CPU multiplies.
using Ahead = std::function<void(std::ptrdiff_t part, std::ptrdiff_t parts)>;

// n columns rounded up to whole panels.
inline std::ptrdiff_t whole_panels(std::ptrdiff_t n) {
  const std::ptrdiff_t nr = kernels().nr;
  return (n + nr - 1) / nr * nr;
}

// The right-hand side [k, n] of a product, stored in panels of kernels().nr columns (zeros behind n).
class PackedMatrix {
 public:
  // Sets the shape; the content is undefined until packed.
  void resize(std::ptrdiff_t k, std::ptrdiff_t n);

  // Packs rows [begin, end) of the k rows; row(k) points to n contiguous values.
  template <class Row>
  void pack_rows(std::ptrdiff_t begin, std::ptrdiff_t end, Row row) {
    const std::ptrdiff_t nr = kernels().nr;
    for (std::ptrdiff_t k = begin; k < end; ++k) {
      const float* source = row(k);
      for (std::ptrdiff_t j = 0; j < n_; j += nr) {
        float* target = data_.data() + (j / nr * k_ + k) * nr;
        const std::ptrdiff_t size = n_ - j < nr ? n_ - j : nr;
        for (std::ptrdiff_t c = 0; c < size; ++c) target[c] = source[j + c];
        for (std::ptrdiff_t c = size; c < nr; ++c) target[c] = 0.0f;
      }
    }
  }

  // Packs columns [begin, end), begin on a multiple of nr, from the transposed matrix x [n, ld] (k contiguous).
  void pack_transposed(std::ptrdiff_t begin, std::ptrdiff_t end, const float* x, std::ptrdiff_t ld);

  std::ptrdiff_t k() const { return k_; }
  std::ptrdiff_t n() const { return n_; }
  std::ptrdiff_t padded() const { return whole_panels(n_); }  // the width that a product with all columns writes

  struct Part {
    std::ptrdiff_t k_begin, k_end, n_begin, n_end;  // rows; columns, n_begin on a multiple of nr
  };
  // c[0..m) = (accumulate ? c : 0) + a · (a part of this), whole panels wide; a[i] points at the value for k_begin. A panel
  // stays in the nearest cache while all m rows pass it by.
  void multiply(std::ptrdiff_t m, const float* const* a, std::ptrdiff_t a_step, const Part& part, float* c,
                std::ptrdiff_t ldc, bool accumulate, const Ahead* ahead = nullptr) const;

 private:
  std::ptrdiff_t k_ = 0, n_ = 0;
  Buffer<float> data_;
};

// The right-hand side [k, n] in bfloat16, by pairs of consecutive k: panels [k / 2][nr][2], zeros behind n and an odd k.
class PackedPairs {
 public:
  void resize(std::ptrdiff_t k, std::ptrdiff_t n);

  // Packs rows [begin, end), begin even; row(k) points to n contiguous values.
  template <class Row>
  void pack_rows(std::ptrdiff_t begin, std::ptrdiff_t end, Row row) {
    const std::ptrdiff_t nr = kernels().nr;
    for (std::ptrdiff_t k = begin; k < end; k += 2) {
      const std::uint16_t* first = row(k);
      const std::uint16_t* second = k + 1 < k_ ? row(k + 1) : nullptr;
      for (std::ptrdiff_t j = 0; j < n_; j += nr) {
        std::uint16_t* target = panel(j) + k * nr;
        const std::ptrdiff_t size = n_ - j < nr ? n_ - j : nr;
        kernels().interleave(first + j, second == nullptr ? nullptr : second + j, size, target);
        for (std::ptrdiff_t c = 2 * size; c < 2 * nr; ++c) target[c] = 0;
      }
    }
  }

  // Packs columns [begin, end), begin on a multiple of nr, from the transposed matrix x [n, ld] (k contiguous; k and ld even).
  void pack_transposed(std::ptrdiff_t begin, std::ptrdiff_t end, const std::uint16_t* x, std::ptrdiff_t ld);

  // As PackedMatrix::multiply; k_begin is even, and a[i] points at the pair of k_begin.
  void multiply(std::ptrdiff_t m, const std::uint16_t* const* a, std::ptrdiff_t a_step, const PackedMatrix::Part& part,
                float* c, std::ptrdiff_t ldc, bool accumulate, const Ahead* ahead = nullptr) const;

 private:
  std::uint16_t* panel(std::ptrdiff_t j) { return data_.data() + j / kernels().nr * depth() * kernels().nr; }
  std::ptrdiff_t depth() const { return (k_ + 1) / 2 * 2; }

  std::ptrdiff_t k_ = 0, n_ = 0;
  Buffer<std::uint16_t> data_;
};

}  // namespace dslide
