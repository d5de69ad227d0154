#include "tables.hpp"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "kernels.hpp"
#include "philox.hpp"

namespace dslide {

void HashTables::build(Pool& pool, const std::uint32_t* codes, std::size_t count, int tables, std::uint32_t buckets,
                       std::int64_t cap, Policy policy, std::uint64_t seed, std::uint64_t draw) {
  constexpr std::size_t kAhead = 16;  // ids whose places are on their way
  count_ = count;
  buckets_ = buckets;
  cap_ = cap;
  policy_ = policy;
  const Philox random(seed, Purpose::kReservoir);
  offsets_.fit(static_cast<std::size_t>(tables) * (buckets_ + 1));
  ids_.fit(static_cast<std::size_t>(tables) * count);
  pool.run([&](int thread) {
    std::vector<std::int32_t> cursor(buckets_);
    for (int t = thread; t < tables; t += pool.threads()) {
      std::int32_t* offsets = offsets_.data() + static_cast<std::size_t>(t) * (buckets_ + 1);
      const std::uint32_t* code = codes + static_cast<std::size_t>(t) * count;
      std::fill_n(offsets, buckets_ + 1, 0);
      for (std::size_t i = 0; i < count; ++i) ++offsets[code[i] + 1];
      for (std::size_t b = 0; b < buckets_; ++b) offsets[b + 1] += offsets[b];
      std::copy_n(offsets, buckets_, cursor.begin());
      std::int32_t* ids = ids_.data() + static_cast<std::size_t>(t) * count;
      for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(ids + cursor[code[i + kAhead]], 1);
        ids[cursor[code[i]]++] = static_cast<std::int32_t>(i);
      }
      if (policy != Policy::kReservoir) continue;
      for (std::size_t b = 0; b < buckets; ++b) {
        std::int32_t* bucket = ids + offsets[b];
        for (std::int64_t i = cap; i < offsets[b + 1] - offsets[b]; ++i) {
          const auto words = random(draw, static_cast<std::uint64_t>(t) << 32 | static_cast<std::uint32_t>(bucket[i]));
          const std::int64_t place = Philox::below(words[0], static_cast<std::uint32_t>(i + 1));
          if (place < cap) bucket[place] = bucket[i];
        }
      }
    }
  });
}

LshSampler::LshSampler(OutputLayer& layer, const Config& config)
    : layer_(layer), config_(config), scratch_(static_cast<std::size_t>(layer.pool().threads())) {
  if (config.bucket_cap < 1 || config.min_active < 0 || config.top_up < 0)
    throw std::invalid_argument("lsh sampler: the bucket cap must be positive, the bounds not negative");
  if (config.beta < 1 || config.min_hits < 1) throw std::invalid_argument("lsh sampler: beta and min_hits must be positive");
  new_functions(config.seed);
  rebuild();
}

void LshSampler::new_functions(std::uint64_t seed) {
  family_ = make_hash_family(layer_.config().hidden, config_.hash, seed);
}

// Rows in bfloat16 are hashed from a copy, some of them at a time.
void LshSampler::hash_rows() {
  constexpr std::size_t kBlock = 4096;
  const auto rows = static_cast<std::size_t>(layer_.config().shard.size());
  const auto hidden = static_cast<std::size_t>(layer_.config().hidden);
  const WeightTable& weights = layer_.weights();
  Pool& pool = layer_.pool();
  codes_.fit(rows * static_cast<std::size_t>(config_.hash.l));
  if (!weights.half()) return family_->hash(pool, weights.row(0), rows, codes_.data(), rows);
  Buffer<float> copy(std::min(kBlock, rows) * hidden);
  for (std::size_t first = 0; first < rows; first += kBlock) {
    const std::size_t count = std::min(kBlock, rows - first);
    pool.ranges(count, 1, [&](std::size_t begin, std::size_t end) {
      kernels().expand(weights.half_row(static_cast<std::int64_t>(first + begin)),
                       static_cast<std::ptrdiff_t>((end - begin) * hidden), copy.data() + begin * hidden);
    });
    family_->hash(pool, copy.data(), count, codes_.data() + first, rows);
  }
}

void LshSampler::rebuild(std::uint64_t draw) {
  layer_.settle();
  hash_rows();
  const auto count = static_cast<std::size_t>(layer_.config().shard.size());
  const int l = config_.hash.l;
  tables_.build(layer_.pool(), codes_.data(), count, l, family_->buckets(), config_.bucket_cap, config_.policy,
                config_.seed, draw);
}

// Appends to `list` the selected ids of rows that aren't marked in `seen`, and marks them.
void LshSampler::answer(const Batch& batch, std::size_t point, std::uint8_t mark, Scratch& scratch,
                        std::vector<std::int32_t>& list) const {
  const std::size_t points = batch.size();
  const int l = config_.hash.l;
  const auto bucket = [&](int t) { return tables_.bucket(t, query_codes_[static_cast<std::size_t>(t) * points + point]); };
  auto& seen = scratch.seen;
  if (config_.selection == Selection::kUnion) {
    auto& buckets = scratch.buckets;
    buckets.resize(static_cast<std::size_t>(l));
    const std::size_t size = list.size();
    std::size_t most = size;
    for (int t = 0; t < l; ++t) {  // all are on their way from memory before the first is read
      const auto [first, last] = buckets[static_cast<std::size_t>(t)] = bucket(t);
      for (std::ptrdiff_t i = 0; i < last - first; i += 16) __builtin_prefetch(first + i);
      most += static_cast<std::size_t>(last - first);
    }
    list.resize(most);
    std::int32_t* end = list.data() + size;
    std::uint8_t* marks = seen.data();
    for (const auto& [first, last] : buckets)
      for (const std::int32_t* id = first; id != last; ++id) {  // without a branch, which nobody could predict
        const std::int32_t row = *id;
        *end = row;
        end += marks[row] != mark ? 1 : 0;
        marks[row] = mark;
      }
    list.resize(static_cast<std::size_t>(end - list.data()));
    return;
  }
  if (config_.selection == Selection::kVanilla) {
    const auto most = list.size() + static_cast<std::size_t>(config_.beta);
    auto& order = scratch.order;
    order.resize(static_cast<std::size_t>(l));
    std::iota(order.begin(), order.end(), 0);
    const Philox random(config_.seed, Purpose::kTableOrder);
    for (int t = 0; t < l; ++t) {  // a Fisher-Yates shuffle, a step at a time
      const auto words = random(batch.step() << 24 | static_cast<std::uint64_t>(t), static_cast<std::uint64_t>(batch.row(point)));
      const auto other = t + static_cast<int>(Philox::below(words[0], static_cast<std::uint32_t>(l - t)));
      std::swap(order[static_cast<std::size_t>(t)], order[static_cast<std::size_t>(other)]);
      const auto [first, last] = bucket(order[static_cast<std::size_t>(t)]);
      for (const std::int32_t* id = first; id != last; ++id) {
        if (seen[static_cast<std::size_t>(*id)] == mark) continue;
        if (list.size() == most) return;
        seen[static_cast<std::size_t>(*id)] = mark;
        list.push_back(*id);
      }
    }
    return;
  }
  auto& hits = scratch.hits;
  auto& found = scratch.found;
  hits.resize(seen.size());
  found.clear();
  for (int t = 0; t < l; ++t) {
    const auto [first, last] = bucket(t);
    for (const std::int32_t* id = first; id != last; ++id) {
      const auto row = static_cast<std::size_t>(*id);
      if (seen[row] == mark) {
        ++hits[row];
      } else {
        seen[row] = mark;
        hits[row] = 1;
        found.push_back(*id);
      }
    }
  }
  const auto count = [&](std::int32_t row) { return hits[static_cast<std::size_t>(row)]; };
  auto end = found.end();
  if (config_.selection == Selection::kThreshold) {
    end = std::partition(found.begin(), found.end(), [&](std::int32_t row) { return count(row) >= config_.min_hits; });
  } else if (static_cast<std::int64_t>(found.size()) > config_.beta) {
    end = found.begin() + config_.beta;
    std::nth_element(found.begin(), end, found.end(), [&](std::int32_t a, std::int32_t b) {
      return count(a) != count(b) ? count(a) > count(b) : a < b;
    });
  }
  list.insert(list.end(), found.begin(), end);
  for (; end != found.end(); ++end) seen[static_cast<std::size_t>(*end)] = 0;  // the top-up may draw them
}

// Fills lists_: every point's answer, and with `own_labels` its labels of the shard before it and the top-up after it.
void LshSampler::query(const Batch& batch, const float* h, bool own_labels) {
  Pool& pool = layer_.pool();
  const Shard& shard = layer_.config().shard;
  const std::size_t points = batch.size();
  const auto labels = static_cast<std::uint32_t>(shard.size());
  query_codes_.resize(points * static_cast<std::size_t>(config_.hash.l));
  family_->hash(pool, h, points, query_codes_.data(), points);
  lists_.resize(std::max(lists_.size(), points));
  const Philox random(config_.seed, Purpose::kTopUp);
  pool.run([&](int thread) {
    Scratch& scratch = scratch_[static_cast<std::size_t>(thread)];
    auto& seen = scratch.seen;
    constexpr std::uint8_t kLastMark = 255;
    std::uint8_t mark = kLastMark;
    const auto [begin, end] = Pool::part(points, 1, thread, pool.threads());
    for (std::size_t p = begin; p < end; ++p) {
      auto& list = lists_[p];
      list.clear();
      if (mark == kLastMark) {
        seen.assign(labels, 0);
        mark = 0;
      }
      ++mark;
      const auto add = [&](std::int32_t row) {
        if (seen[static_cast<std::size_t>(row)] == mark) return;
        seen[static_cast<std::size_t>(row)] = mark;
        list.push_back(row);
      };
      if (own_labels) {
        const Csr& y = batch.y();
        for (std::int64_t i = y.indptr[batch.row(p)]; i < y.indptr[batch.row(p) + 1]; ++i)
          if (y.indices[i] >= shard.begin && y.indices[i] < shard.end)
            add(static_cast<std::int32_t>(y.indices[i] - shard.begin));
      }
      answer(batch, p, mark, scratch, list);
      if (!own_labels || static_cast<std::int64_t>(list.size()) >= config_.min_active) continue;
      const auto goal = static_cast<std::size_t>(std::min<std::int64_t>(config_.top_up, labels));
      for (std::uint64_t draw = 0; list.size() < goal; ++draw) {
        const auto words = random(batch.step() << 24 | draw, static_cast<std::uint64_t>(batch.row(p)));
        for (std::size_t i = 0; i < 4 && list.size() < goal; ++i)
          add(static_cast<std::int32_t>(Philox::below(words[i], labels)));
      }
    }
  });
}

void LshSampler::propose(const Batch& batch, const float* h, std::vector<std::int32_t>& rows) {
  query(batch, h, false);
  for (std::size_t p = 0; p < batch.size(); ++p) rows.insert(rows.end(), lists_[p].begin(), lists_[p].end());
}

// Point -> rows becomes row -> points, points ascending. Threads that have points of their own deal the pairs out to blocks of
// rows, in the order of points; threads that have blocks of their own sort each by row. What is counted stays in the nearest
// caches, and the result doesn't depend on the threads.
void LshSampler::invert(std::size_t points, ActiveSet& active) {
  constexpr std::uint32_t kBlock = 256;
  Pool& pool = layer_.pool();
  const auto labels = static_cast<std::size_t>(layer_.config().shard.size());
  const std::size_t blocks = (labels + kBlock - 1) / kBlock;
  pool.run([&](int thread) {
    auto& cursor = scratch_[static_cast<std::size_t>(thread)].cursor;
    cursor.assign(blocks, 0);
    const auto [begin, end] = Pool::part(points, 1, thread, pool.threads());
    for (std::size_t p = begin; p < end; ++p)
      for (const std::int32_t row : lists_[p]) ++cursor[static_cast<std::uint32_t>(row) / kBlock];
  });
  block_begin_.resize(blocks + 1);
  std::int64_t pairs = 0;
  for (std::size_t b = 0; b < blocks; ++b) {
    block_begin_[b] = pairs;
    for (Scratch& scratch : scratch_) pairs += std::exchange(scratch.cursor[b], pairs);
  }
  block_begin_[blocks] = pairs;
  pairs_.resize(static_cast<std::size_t>(pairs));
  active.pair_points.resize(static_cast<std::size_t>(pairs));
  pool.run([&](int thread) {
    auto& cursor = scratch_[static_cast<std::size_t>(thread)].cursor;
    const auto [begin, end] = Pool::part(points, 1, thread, pool.threads());
    for (std::size_t p = begin; p < end; ++p)
      for (const std::int32_t row : lists_[p]) {
        const auto at = static_cast<std::uint32_t>(row);
        pairs_[static_cast<std::size_t>(cursor[at / kBlock]++)] = {at % kBlock, static_cast<std::int32_t>(p)};
      }
  });
  pool.run([&](int thread) {
    Scratch& scratch = scratch_[static_cast<std::size_t>(thread)];
    scratch.rows.clear();
    scratch.row_begin.clear();
    const auto [begin, end] = Pool::part(blocks, 1, thread, pool.threads());
    for (std::size_t b = begin; b < end; ++b) {
      const auto from = static_cast<std::size_t>(block_begin_[b]), to = static_cast<std::size_t>(block_begin_[b + 1]);
      std::int64_t place[kBlock] = {}, row_begin[kBlock + 1];
      std::int32_t rows[kBlock + 1];
      for (std::size_t i = from; i < to; ++i) ++place[pairs_[i].row];
      std::size_t count = 0;
      auto next = static_cast<std::int64_t>(from);
      for (std::uint32_t r = 0; r < kBlock; ++r) {  // without a branch, which nobody could predict
        rows[count] = static_cast<std::int32_t>(b * kBlock + r);
        row_begin[count] = next;
        count += place[r] != 0;
        next += std::exchange(place[r], next);
      }
      scratch.rows.insert(scratch.rows.end(), rows, rows + count);
      scratch.row_begin.insert(scratch.row_begin.end(), row_begin, row_begin + count);
      for (std::size_t i = from; i < to; ++i)
        active.pair_points[static_cast<std::size_t>(place[pairs_[i].row]++)] = pairs_[i].point;
    }
  });
  active.row_count = 0;
  for (const Scratch& scratch : scratch_) active.row_count += scratch.rows.size();
  active.rows.resize(active.row_count);
  active.pair_indptr.resize(active.row_count + 1);
  active.pair_indptr[active.row_count] = pairs;
  pool.run([&](int thread) {
    std::ptrdiff_t position = 0;
    for (int t = 0; t < thread; ++t) position += static_cast<std::ptrdiff_t>(scratch_[static_cast<std::size_t>(t)].rows.size());
    const Scratch& scratch = scratch_[static_cast<std::size_t>(thread)];
    std::copy(scratch.rows.begin(), scratch.rows.end(), active.rows.begin() + position);
    std::copy(scratch.row_begin.begin(), scratch.row_begin.end(), active.pair_indptr.begin() + position);
  });
}

void LshSampler::select(const Batch& batch, const float* h, ActiveSet& active) {
  const Shard& shard = layer_.config().shard;
  const std::size_t points = batch.size();
  active.clear();
  active.shared = false;
  query(batch, h, true);
  invert(points, active);
  std::size_t position = 0;
  const auto [first, last] = batch.own(shard.begin, shard.end);
  for (const Batch::Own* pair = first; pair != last; ++pair) {
    const auto row = static_cast<std::int32_t>(pair->label - shard.begin);
    while (active.rows[position] < row) ++position;
    active.own.push_back({static_cast<std::int32_t>(position), pair->point});
  }
}

}  // namespace dslide
