#include "pool.hpp"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dslide {
namespace {

// How long a thread spins before it sleeps: longer than what one thread does alone within a training step, as waking a
// thread takes some 25 us.
constexpr std::chrono::microseconds kSpin{200};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Waits for `done`, at most kSpin; whether it came.
template <class Done>
bool spin(Done done) {
  const auto until = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < until);
  return false;
}

}  // namespace

Pool::Pool(int threads) {
  if (threads < 1 || threads > 1024) throw std::invalid_argument("threads must be between 1 and 1024");
  workers_.reserve(static_cast<std::size_t>(threads - 1));
  for (int t = 1; t < threads; ++t) workers_.emplace_back([this, t] { loop(t); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
    epoch_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Pool::call(int thread) {
  try {
    (*work_)(thread);
  } catch (...) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void Pool::loop(int thread) {
  std::uint64_t seen = 0;
  for (;;) {
    const auto called = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (!spin(called)) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, called);
    }
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    call(thread);
    pending_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

void Pool::run(const std::function<void(int)>& work) {
  std::lock_guard<std::mutex> one_caller(caller_);
  work_ = &work;
  error_ = nullptr;
  if (!workers_.empty()) {
    pending_.store(static_cast<int>(workers_.size()), std::memory_order_release);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_acq_rel);
    }
    wake_.notify_all();
  }
  call(0);
  const auto finished = [&] { return pending_.load(std::memory_order_acquire) == 0; };
  if (!spin(finished))
    while (!finished()) std::this_thread::yield();
  work_ = nullptr;
  if (error_) std::rethrow_exception(error_);
}

std::pair<std::size_t, std::size_t> Pool::part(std::size_t count, std::size_t grain, int thread, int threads) {
  const std::size_t grains = (count + grain - 1) / grain;
  const auto t = static_cast<std::size_t>(thread), n = static_cast<std::size_t>(threads);
  return {std::min(count, grains * t / n * grain), std::min(count, grains * (t + 1) / n * grain)};
}

void Pool::ranges(std::size_t count, std::size_t grain,
                  const std::function<void(std::size_t, std::size_t)>& body) {
  run([&](int thread) {
    const auto [begin, end] = part(count, grain, thread, threads());
    if (begin < end) body(begin, end);
  });
}

}  // namespace dslide
