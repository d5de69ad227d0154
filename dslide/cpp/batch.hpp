// The points of one batch: their features, the same by feature, and their labels by label.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "pool.hpp"

namespace dslide {

// A view of a CSR matrix [rows, columns]; values may be null (a pattern).
struct Csr {
  const std::int64_t* indptr = nullptr;
  const std::int32_t* indices = nullptr;
  const float* values = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  // Throws std::invalid_argument unless indptr ascends from 0 to nnz and every index lies in [0, columns).
  void check(std::int64_t nnz, const char* name) const;
};

class Batch {
 public:
  Batch(Pool& pool, const Csr& x, const Csr& y);

  // Takes the points `rows` (global row ids, each in [0, x.rows)); `step` keys this batch's random draws.
  void select(const std::int64_t* rows, std::size_t count, std::uint64_t step);

  std::size_t size() const { return rows_.size(); }
  std::uint64_t step() const { return step_; }
  std::int64_t row(std::size_t point) const { return rows_[point]; }
  const Csr& x() const { return x_; }
  const Csr& y() const { return y_; }
  std::int64_t label_count(std::size_t point) const {
    return y_.indptr[rows_[point] + 1] - y_.indptr[rows_[point]];
  }

  // The features of the batch, dealt out to the pool's threads in runs of kRun, so that each thread builds and uses its
  // own index, never waits for another's, and shares no cache line of what it writes by feature.
  static constexpr std::int32_t kRun = 64;
  std::uint32_t thread_of(std::int32_t feature) const {
    const std::uint32_t mixed = static_cast<std::uint32_t>(feature / kRun) * 0x9E3779B9u;  // frequent ones lie together
    return static_cast<std::uint32_t>(std::uint64_t{mixed} * threads_ >> 32);
  }
  struct Features {
    // Feature ids[s], in order of first appearance, has the points and values at [indptr[s], indptr[s + 1]).
    std::vector<std::int32_t> ids, indptr, points;
    std::vector<float> values;

   private:
    friend class Batch;
    struct Entry {
      std::int32_t feature, point;
      float value;
      std::int32_t slot;
    };
    std::vector<Entry> entries_;  // a thread's part of the batch, in the order of points
  };
  const Features& features(int thread) const { return features_[static_cast<std::size_t>(thread)]; }
  // The position of `feature` in its thread's Features, or -1 if no point of the batch has it.
  std::int32_t feature_slot(std::int32_t feature) const {
    return std::max(-1, slot_[static_cast<std::size_t>(feature)] - first_slot_);
  }

  // (label, point) pairs, ascending.
  struct Own {
    std::int32_t label, point;
  };
  // Those with labels in [begin, end).
  std::pair<const Own*, const Own*> own(std::int64_t begin, std::int64_t end) const;

 private:
  void index_features(int thread);
  void index_labels();

  Pool& pool_;
  std::uint32_t threads_;
  Csr x_, y_;
  std::uint64_t step_ = 0;
  std::vector<std::int64_t> rows_;
  std::vector<Features> features_;  // by thread
  // By feature: its position in its thread's Features plus first_slot_; less than first_slot_ where the batch does not have
  // it. first_slot_ grows from batch to batch, so that nothing has to be cleared.
  Buffer<std::int32_t> slot_;
  std::int32_t first_slot_ = 1, entries_ = 0;
  std::vector<Own> sorted_;
  std::vector<Own> own_;
};

}  // namespace dslide
