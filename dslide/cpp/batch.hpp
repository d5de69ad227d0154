// The points of one batch: their features, the same by feature, and their labels by label.
#pragma once

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

  // By feature: feature slot s is features()[s], in order of first appearance; its points and values lie at
  // [feature_indptr()[s], feature_indptr()[s + 1]).
  const std::vector<std::int32_t>& features() const { return features_; }
  const std::vector<std::int64_t>& feature_indptr() const { return feature_indptr_; }
  const std::vector<std::int32_t>& feature_points() const { return feature_points_; }
  const std::vector<float>& feature_values() const { return feature_values_; }
  // The feature's slot, or -1 if no point of the batch has it.
  std::int32_t feature_slot(std::int32_t feature) const {
    const auto slot = slot_[static_cast<std::size_t>(feature)];
    return slot < static_cast<std::int32_t>(features_.size()) && features_[slot] == feature ? slot : -1;
  }

  // (label, point) pairs, ascending.
  struct Own {
    std::int32_t label, point;
  };
  // Those with labels in [begin, end).
  std::pair<const Own*, const Own*> own(std::int64_t begin, std::int64_t end) const;

 private:
  void index_features();
  void index_labels();

  Pool& pool_;
  Csr x_, y_;
  std::uint64_t step_ = 0;
  std::vector<std::int64_t> rows_;
  std::vector<std::int32_t> features_;
  std::vector<std::int64_t> feature_indptr_, cursor_;
  std::vector<std::int32_t> feature_points_;
  std::vector<float> feature_values_;
  Buffer<std::int32_t> slot_;  // [features]: valid only where features_[slot_[f]] == f
  std::vector<std::int32_t> entry_slot_;
  std::vector<std::uint64_t> keys_;
  std::vector<Own> own_;
};

}  // namespace dslide
