#include "batch.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.hpp"
#include "radix_sort.hpp"

namespace dslide {

void Csr::check(std::int64_t nnz, const char* name) const {
  const auto fail = [&](const std::string& what) { throw std::invalid_argument(std::string(name) + ": " + what); };
  if (rows < 0 || indptr[0] != 0 || indptr[rows] != nnz) fail("indptr must go from 0 to the number of indices");
  for (std::int64_t r = 0; r < rows; ++r)
    if (indptr[r + 1] < indptr[r]) fail("indptr descends at row " + std::to_string(r));
  for (std::int64_t i = 0; i < nnz; ++i)
    if (indices[i] < 0 || indices[i] >= columns) fail("index " + std::to_string(indices[i]) + " is out of range");
}

Batch::Batch(Pool& pool, const Csr& x, const Csr& y)
    : pool_(pool), pieces_(kShares, pool.threads()), x_(x), y_(y), features_(static_cast<std::size_t>(pool.threads())) {
  if (x.rows != y.rows) throw std::invalid_argument("x and y have different numbers of rows");
  slot_.reset(static_cast<std::size_t>(x.columns));
}

void Batch::select(const std::int64_t* rows, std::size_t count, std::uint64_t step) {
  for (std::size_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= x_.rows)
      throw std::invalid_argument("row " + std::to_string(rows[i]) + " is out of range");
  std::int64_t entries = 0;
  for (std::size_t i = 0; i < count; ++i) entries += x_.indptr[rows[i] + 1] - x_.indptr[rows[i]];
  if (entries > std::numeric_limits<std::int32_t>::max())
    throw std::invalid_argument("a batch with more than 2^31 - 1 values; take smaller batches");
  if (first_slot_ > std::numeric_limits<std::int32_t>::max() - entries_ - entries) {
    std::fill_n(slot_.data(), slot_.size(), 0);
    first_slot_ = 1;
  } else {
    first_slot_ += entries_;
  }
  entries_ = static_cast<std::int32_t>(entries);
  rows_.assign(rows, rows + count);
  step_ = step;
  pool_.run([&](int thread) {
    if (thread == pool_.threads() - 1) index_labels();
    index_features(thread);
  });
}

std::pair<const Batch::Own*, const Batch::Own*> Batch::own(std::int64_t begin, std::int64_t end) const {
  const auto below = [](const Own& pair, std::int64_t label) { return pair.label < label; };
  const Own *first = own_.data(), *last = own_.data() + own_.size();
  return {std::lower_bound(first, last, begin, below), std::lower_bound(first, last, end, below)};
}

template <class RowOf>
void Batch::Features::Rows::take(std::size_t points, std::int32_t most, const FeatureUnits& which, RowOf row) {
  constexpr std::ptrdiff_t kLine = 16;  // values in a cache line
  constexpr std::size_t kPoints = 4;    // points whose entries are on their way
  constexpr std::size_t kTouched = 16;  // points that are touched together
  indptr.resize(points + 1);
  const std::size_t size = static_cast<std::size_t>(most) + Kernels::kTakenSlack;
  std::int32_t* to_ids = ids.at_least(size);
  float* to_values = values.at_least(size);
  std::int32_t taken = 0;
  // Always inlined, as prefetch() is (buffer.hpp).
  const auto touch_points = [&](std::size_t from) __attribute__((always_inline)) {
    for (std::size_t p = from; p < std::min(from + kTouched, points); ++p) {
      touch(row(p).ids, 1);
      touch(row(p).values, 1);
    }
  };
  touch_points(0);
  for (std::size_t p = 0; p < points; ++p) {
    if (p % kTouched == 0) touch_points(p + kTouched);
    if (p + kPoints < points) {
      const Row ahead = row(p + kPoints);
      for (std::ptrdiff_t i = 0; i < ahead.count; i += kLine) {
        __builtin_prefetch(ahead.ids + i);
        __builtin_prefetch(ahead.values + i);
      }
    }
    indptr[p] = taken;
    const Row from = row(p);
    taken += static_cast<std::int32_t>(
        kernels().take_features(from.ids, from.values, from.count, which, to_ids + taken, to_values + taken));
  }
  indptr[points] = taken;
}

void Batch::index_features(int thread) {
  constexpr std::int32_t kAhead = 160;  // entries whose slots are on their way
  const std::size_t points = rows_.size();
  Features& part = features_[static_cast<std::size_t>(thread)];

  // The points' features of the shares that this thread sums over, and of those its own.
  const auto row_of = [this](std::size_t p) -> Features::Row {
    const std::int64_t from = x_.indptr[rows_[p]], to = x_.indptr[rows_[p] + 1];
    return {x_.indices + from, x_.values + from, to - from};
  };
  const Features::Rows* own[kShares] = {nullptr, nullptr};
  std::int32_t count = 0;
  pieces_.each(thread, [&](int share, int) {
    if (own[share] != nullptr) return;  // several pieces of one share
    Features::Rows& all = part.shares_[share];
    all.take(points, entries_, units_of_share(share), row_of);
    own[share] = &all;
    if (pieces_.of_part() > 1) {
      part.pieces_[share].take(points, all.count(), units_of(thread), [&](std::size_t p) { return all.row(p); });
      own[share] = &part.pieces_[share];
    }
    count += own[share]->count();
  });

  // A slot for each feature, and how many entries it has.
  const auto entries = static_cast<std::size_t>(count);
  part.ids.resize(entries + 1);
  part.indptr.assign(entries + 2, 0);
  part.points.resize(entries);
  part.values.resize(entries);
  std::int32_t *slots = slot_.data(), *slot_of = part.slots_.at_least(entries);
  const std::int32_t first = first_slot_;
  std::int32_t found = 0;
  for (const Features::Rows* rows : own) {
    if (rows == nullptr) continue;
    const std::int32_t *ids = rows->ids.data(), n = rows->count();
    for (std::int32_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(&slots[ids[i + kAhead]], 1);
      std::int32_t& at = slots[ids[i]];
      const std::int32_t known = at - first, fresh = known < 0 ? 1 : 0;
      const std::int32_t slot = (found & -fresh) | (known & (fresh - 1));  // no branch: it would go wrong half the time
      at = first + slot;
      part.ids[static_cast<std::size_t>(found)] = ids[i];
      found += fresh;
      *slot_of++ = slot;
      ++part.indptr[static_cast<std::size_t>(slot) + 2];
    }
  }
  part.ids.resize(static_cast<std::size_t>(found));
  part.indptr.resize(static_cast<std::size_t>(found) + 2);
  for (std::size_t s = 2; s < part.indptr.size(); ++s) part.indptr[s] += part.indptr[s - 1];
  slot_of = part.slots_.data();
  for (const Features::Rows* rows : own)
    for (std::size_t p = 0; rows != nullptr && p < points; ++p) {
      const Features::Row row = rows->row(p);
      for (std::ptrdiff_t i = 0; i < row.count; ++i) {  // indptr[slot + 1] runs from the slot's begin to its end
        const auto at = static_cast<std::size_t>(part.indptr[static_cast<std::size_t>(*slot_of++) + 1]++);
        part.points[at] = static_cast<std::int32_t>(p);
        part.values[at] = row.values[i];
      }
    }
  part.indptr.pop_back();
}

void Batch::index_labels() {
  std::int64_t count = 0;
  for (const std::int64_t row : rows_) {  // the labels arrive while the next ones are asked for
    __builtin_prefetch(y_.indices + y_.indptr[row]);
    count += y_.indptr[row + 1] - y_.indptr[row];
  }
  own_.resize(static_cast<std::size_t>(count));
  Own* next = own_.data();  // not push_back, which would write to what all threads read
  for (std::size_t p = 0; p < rows_.size(); ++p)
    for (std::int64_t i = y_.indptr[rows_[p]]; i < y_.indptr[rows_[p] + 1]; ++i)
      *next++ = {y_.indices[i], static_cast<std::int32_t>(p)};
  radix_sort(own_, sorted_, [](const Own& pair) { return pair.label; });  // a label's points stay in their order
  own_.erase(std::unique(own_.begin(), own_.end(),
                         [](const Own& a, const Own& b) { return a.label == b.label && a.point == b.point; }),
             own_.end());
}

}  // namespace dslide
