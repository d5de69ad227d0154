#include "batch.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace dslide {

void Csr::check(std::int64_t nnz, const char* name) const {
  const auto fail = [&](const std::string& what) { throw std::invalid_argument(std::string(name) + ": " + what); };
  if (rows < 0 || indptr[0] != 0 || indptr[rows] != nnz) fail("indptr must go from 0 to the number of indices");
  for (std::int64_t r = 0; r < rows; ++r)
    if (indptr[r + 1] < indptr[r]) fail("indptr descends at row " + std::to_string(r));
  for (std::int64_t i = 0; i < nnz; ++i)
    if (indices[i] < 0 || indices[i] >= columns) fail("index " + std::to_string(indices[i]) + " is out of range");
}

Batch::Batch(Pool& pool, const Csr& x, const Csr& y) : pool_(pool), x_(x), y_(y) {
  if (x.rows != y.rows) throw std::invalid_argument("x and y have different numbers of rows");
  slot_.reset(static_cast<std::size_t>(x.columns));
}

void Batch::select(const std::int64_t* rows, std::size_t count, std::uint64_t step) {
  for (std::size_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= x_.rows)
      throw std::invalid_argument("row " + std::to_string(rows[i]) + " is out of range");
  rows_.assign(rows, rows + count);
  step_ = step;
  pool_.run([&](int thread) {  // two independent indexes: a thread each where there are two
    if (thread == 0) index_features();
    if (thread == pool_.threads() - 1) index_labels();
  });
}

std::pair<const Batch::Own*, const Batch::Own*> Batch::own(std::int64_t begin, std::int64_t end) const {
  const auto below = [](const Own& pair, std::int64_t label) { return pair.label < label; };
  const Own *first = own_.data(), *last = own_.data() + own_.size();
  return {std::lower_bound(first, last, begin, below), std::lower_bound(first, last, end, below)};
}

void Batch::index_features() {
  constexpr std::int64_t kAhead = 16;
  std::size_t entries = 0;
  for (const std::int64_t row : rows_) entries += static_cast<std::size_t>(x_.indptr[row + 1] - x_.indptr[row]);
  entry_slot_.resize(entries);
  features_.clear();
  feature_indptr_.assign(1, 0);
  std::size_t entry = 0;
  for (const std::int64_t row : rows_) {
    const std::int64_t end = x_.indptr[row + 1];
    for (std::int64_t i = x_.indptr[row]; i < end; ++i) {
      if (i + kAhead < end) __builtin_prefetch(&slot_[static_cast<std::size_t>(x_.indices[i + kAhead])], 1);
      const std::int32_t feature = x_.indices[i];
      std::int32_t slot = feature_slot(feature);
      if (slot < 0) {
        slot = static_cast<std::int32_t>(features_.size());
        slot_[static_cast<std::size_t>(feature)] = slot;
        features_.push_back(feature);
        feature_indptr_.push_back(0);
      }
      ++feature_indptr_[static_cast<std::size_t>(slot) + 1];
      entry_slot_[entry++] = slot;
    }
  }
  for (std::size_t s = 0; s < features_.size(); ++s) feature_indptr_[s + 1] += feature_indptr_[s];
  cursor_.assign(feature_indptr_.begin(), feature_indptr_.end());
  feature_points_.resize(entries);
  feature_values_.resize(entries);
  entry = 0;
  for (std::size_t p = 0; p < rows_.size(); ++p) {
    for (std::int64_t i = x_.indptr[rows_[p]]; i < x_.indptr[rows_[p] + 1]; ++i, ++entry) {
      const auto at = static_cast<std::size_t>(cursor_[static_cast<std::size_t>(entry_slot_[entry])]++);
      feature_points_[at] = static_cast<std::int32_t>(p);
      feature_values_[at] = x_.values[i];
    }
  }
}

void Batch::index_labels() {
  keys_.clear();
  for (std::size_t p = 0; p < rows_.size(); ++p)
    for (std::int64_t i = y_.indptr[rows_[p]]; i < y_.indptr[rows_[p] + 1]; ++i)
      keys_.push_back((static_cast<std::uint64_t>(static_cast<std::uint32_t>(y_.indices[i])) << 32) | p);
  std::sort(keys_.begin(), keys_.end());
  keys_.erase(std::unique(keys_.begin(), keys_.end()), keys_.end());
  own_.clear();
  for (const std::uint64_t key : keys_)
    own_.push_back({static_cast<std::int32_t>(key >> 32), static_cast<std::int32_t>(key & 0xFFFFFFFFu)});
}

}  // namespace dslide
