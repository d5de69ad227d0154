#include "tables.hpp"

#include <algorithm>
#include <stdexcept>

#include "philox.hpp"

namespace dslide {

void HashTables::build(Pool& pool, const std::uint32_t* codes, std::size_t count, int tables, std::uint32_t buckets) {
  count_ = count;
  buckets_ = buckets;
  offsets_.resize(static_cast<std::size_t>(tables) * (buckets_ + 1));
  ids_.resize(static_cast<std::size_t>(tables) * count);
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
      for (std::size_t i = 0; i < count; ++i) ids[cursor[code[i]]++] = static_cast<std::int32_t>(i);
    }
  });
}

LshSampler::LshSampler(OutputLayer& layer, const Config& config)
    : layer_(layer), config_(config), seen_(static_cast<std::size_t>(layer.pool().threads())) {
  if (config.bucket_cap < 1 || config.min_active < 0 || config.top_up < 0)
    throw std::invalid_argument("lsh sampler: the bucket cap must be positive, the bounds not negative");
  new_functions(config.seed);
  rebuild();
}

void LshSampler::new_functions(std::uint64_t seed) {
  const std::int64_t dim = layer_.config().hidden;
  family_ = config_.dwta ? make_dwta(dim, config_.k, config_.l, seed, config_.published_packing)
                         : make_simhash(dim, config_.k, config_.l, seed);
}

void LshSampler::rebuild() {
  const auto count = static_cast<std::size_t>(layer_.config().shard.size());
  codes_.resize(count * static_cast<std::size_t>(config_.l));
  family_->hash(layer_.pool(), layer_.weights().data(), count, codes_.data(), count);
  tables_.build(layer_.pool(), codes_.data(), count, config_.l, family_->buckets());
}

void LshSampler::select(const Batch& batch, const float* h, ActiveSet& active) {
  Pool& pool = layer_.pool();
  const Shard& shard = layer_.config().shard;
  const std::size_t points = batch.size();
  const auto labels = static_cast<std::uint32_t>(shard.size());
  active.clear();
  active.shared = false;
  query_codes_.resize(points * static_cast<std::size_t>(config_.l));
  family_->hash(pool, h, points, query_codes_.data(), points);
  lists_.resize(std::max(lists_.size(), points));
  const Philox random(config_.seed, Purpose::kTopUp);
  pool.run([&](int thread) {
    auto& seen = seen_[static_cast<std::size_t>(thread)];
    seen.assign(labels, 0);
    const auto [begin, end] = Pool::part(points, 1, thread, pool.threads());
    for (std::size_t p = begin; p < end; ++p) {
      auto& list = lists_[p];
      list.clear();
      const auto mark = static_cast<std::uint32_t>(p + 1);
      const auto add = [&](std::int32_t row) {
        if (seen[static_cast<std::size_t>(row)] == mark) return;
        seen[static_cast<std::size_t>(row)] = mark;
        list.push_back(row);
      };
      const Csr& y = batch.y();
      for (std::int64_t i = y.indptr[batch.row(p)]; i < y.indptr[batch.row(p) + 1]; ++i)
        if (y.indices[i] >= shard.begin && y.indices[i] < shard.end) add(static_cast<std::int32_t>(y.indices[i] - shard.begin));
      for (int t = 0; t < config_.l; ++t) {
        const auto [first, last] =
            tables_.bucket(t, query_codes_[static_cast<std::size_t>(t) * points + p], config_.bucket_cap);
        for (const std::int32_t* id = first; id != last; ++id) add(*id);
      }
      if (static_cast<std::int64_t>(list.size()) < config_.min_active) {
        const auto goal = static_cast<std::size_t>(std::min<std::int64_t>(config_.top_up, labels));
        for (std::uint64_t draw = 0; list.size() < goal; ++draw) {
          const auto words = random(batch.step() << 24 | draw, static_cast<std::uint64_t>(batch.row(p)));
          for (std::size_t i = 0; i < 4 && list.size() < goal; ++i)
            add(static_cast<std::int32_t>(Philox::below(words[i], labels)));
        }
      }
    }
  });
  // Invert: point -> rows becomes row -> points, points ascending.
  counts_.assign(std::size_t{labels} + 1, 0);
  for (std::size_t p = 0; p < points; ++p)
    for (const std::int32_t row : lists_[p]) ++counts_[static_cast<std::size_t>(row)];
  active.pair_indptr.push_back(0);
  for (std::uint32_t row = 0; row < labels; ++row) {
    const std::int64_t count = counts_[row];
    counts_[row] = active.pair_indptr.back();
    if (count == 0) continue;
    active.rows.push_back(static_cast<std::int32_t>(row));
    active.pair_indptr.push_back(active.pair_indptr.back() + count);
  }
  active.row_count = active.rows.size();
  active.pair_points.resize(static_cast<std::size_t>(active.pair_indptr.back()));
  for (std::size_t p = 0; p < points; ++p)
    for (const std::int32_t row : lists_[p])
      active.pair_points[static_cast<std::size_t>(counts_[static_cast<std::size_t>(row)]++)] = static_cast<std::int32_t>(p);
  std::size_t position = 0;
  const auto [first, last] = batch.own(shard.begin, shard.end);
  for (const Batch::Own* pair = first; pair != last; ++pair) {
    const auto row = static_cast<std::int32_t>(pair->label - shard.begin);
    while (active.rows[position] < row) ++position;
    active.own.push_back({static_cast<std::int32_t>(position), pair->point});
  }
}

}  // namespace dslide
