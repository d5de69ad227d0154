// A small pool of threads with static partitions.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace dslide {

// Runs a function on every thread and waits. std::thread rather than OpenMP, because ThreadSanitizer
// can't see through libgomp. The calling thread is thread 0. The first exception is rethrown.
class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls work(thread) once for each thread.
  void run(const std::function<void(int)>& work);

  // Calls body(begin, end) for contiguous parts of [0, count), one part a thread, borders on multiples of `grain`.
  void ranges(std::size_t count, std::size_t grain, const std::function<void(std::size_t, std::size_t)>& body);

  // The part of [0, count) that `thread` of `threads` owns, with borders on multiples of `grain`.
  static std::pair<std::size_t, std::size_t> part(std::size_t count, std::size_t grain, int thread, int threads);

 private:
  void loop(int thread);
  void call(int thread);

  std::vector<std::thread> workers_;
  std::mutex caller_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<std::uint64_t> epoch_{0};
  std::atomic<int> pending_{0};
  std::atomic<bool> stop_{false};
  const std::function<void(int)>* work_ = nullptr;
  std::exception_ptr error_;
};

// Parts of some work whose number doesn't depend on the threads, as sums that must not depend on them want it: each is cut
// into as few pieces as make equally many for every thread.
class Pieces {
 public:
  Pieces(int parts, int threads) : of_part_(threads / std::gcd(threads, parts)), of_thread_(parts * of_part_ / threads) {}

  int of_part() const { return of_part_; }
  int of_thread() const { return of_thread_; }

  // Calls body(part, piece) for the pieces of `thread`, piece being one of [0, of_part()).
  template <class Body>
  void each(int thread, Body body) const {
    for (int i = thread * of_thread_; i < (thread + 1) * of_thread_; ++i) body(i / of_part_, i % of_part_);
  }

 private:
  int of_part_, of_thread_;
};

}  // namespace dslide
