// The points of one batch: their features, the same by feature, and their labels by label.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "feature_units.hpp"
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

  // The features of all batches are cut into two shares, whatever the number of threads, and these into the threads' own
  // features: so a row of the input layer is read and written by the same cores in every pass of every step, and cores that
  // don't share a cache hardly exchange rows. More threads than shares cut a share.
  static constexpr int kShares = 2;
  static FeatureUnits units_of_share(int share) { return {kShares, static_cast<std::uint32_t>(share), 1}; }
  FeatureUnits units_of(int thread) const {
    return {static_cast<std::uint64_t>(kShares * pieces_.of_part()),
            static_cast<std::uint32_t>(thread * pieces_.of_thread()), static_cast<std::uint32_t>(pieces_.of_thread())};
  }
  // Calls body(share, begin, end) for the points [begin, end) of [first, last) whose sums over a share the thread makes.
  template <class Body>
  void for_shares(int thread, std::size_t first, std::size_t last, Body body) const {
    pieces_.each(thread, [&](int share, int piece) {
      const auto [begin, end] = Pool::part(last - first, 1, piece, pieces_.of_part());
      body(share, first + begin, first + end);
    });
  }

  // A thread's own; nobody waits for another's.
  class Features {
   public:
    // Feature ids[s], in order of first appearance, has the points and values at [indptr[s], indptr[s + 1]).
    std::vector<std::int32_t> ids, indptr, points;
    std::vector<float> values;

    // The features of one share that a point has, where the thread makes sums over the share.
    struct Row {
      const std::int32_t* ids;
      const float* values;
      std::ptrdiff_t count;
    };
    Row row(int share, std::size_t point) const { return shares_[share].row(point); }

   private:
    friend class Batch;
    struct Rows {
      std::vector<std::int32_t> indptr;  // point p's are at [indptr[p], indptr[p + 1])
      Buffer<std::int32_t> ids;
      Buffer<float> values;

      Row row(std::size_t p) const {
        return {ids.data() + indptr[p], values.data() + indptr[p], indptr[p + 1] - indptr[p]};
      }
      std::int32_t count() const { return indptr.back(); }
      // Takes of every row(p) the features of the units `which`; the rows have `most` in all.
      template <class RowOf>
      void take(std::size_t points, std::int32_t most, const FeatureUnits& which, RowOf row);
    };
    Rows shares_[kShares];
    Rows pieces_[kShares];  // the thread's own features of a share, where other threads have some, too
    Buffer<std::int32_t> slots_;
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
  Pieces pieces_;  // of the shares
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
