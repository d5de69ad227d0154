#include "samplers.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "philox.hpp"

namespace dslide {

void FullSampler::select(const Batch& batch, const float* /*h*/, ActiveSet& active) {
  active.clear();
  active.all = true;
  active.row_count = static_cast<std::size_t>(shard_.size());
  const auto [first, last] = batch.own(shard_.begin, shard_.end);
  for (auto pair = first; pair != last; ++pair)
    active.own.push_back({static_cast<std::int32_t>(pair->label - shard_.begin), pair->point});
}

InBatchSampler::InBatchSampler(const Shard& shard, const Config& config, const std::int64_t* counts)
    : shard_(shard), config_(config) {
  if (config.num_points < 1 || config.batch_size < 1 || config.extras < 0)
    throw std::invalid_argument("in-batch sampler: points and batch size must be positive, extras not negative");
  if (!config.log_q) return;
  log_q_.resize(static_cast<std::size_t>(shard.size()));
  const double n = static_cast<double>(config.num_points), labels = static_cast<double>(shard.labels_total);
  const double miss_uniform =
      config.extras == 0 ? 0.0 : static_cast<double>(config.extras) * std::log1p(-1.0 / labels);
  for (std::size_t i = 0; i < log_q_.size(); ++i) {
    // A label that no point has is never drawn as one; half a point keeps its logarithm finite.
    const double f = std::max(0.5, static_cast<double>(counts[shard.begin + static_cast<std::int64_t>(i)]));
    double log_miss = miss_uniform;
    if (!config.own_only)
      log_miss += static_cast<double>(std::max<std::int64_t>(1, config.batch_size - 1)) * std::log1p(-std::min(f / n, 1.0));
    log_q_[i] = static_cast<float>(std::log(-std::expm1(log_miss)));
    if (!std::isfinite(log_q_[i])) log_q_[i] = 0.0f;  // own_only without extras: no negatives at all
  }
}

void InBatchSampler::select(const Batch& batch, const float* /*h*/, ActiveSet& active) {
  active.clear();
  drawn_.clear();
  const Philox random(config_.seed, Purpose::kUniformExtras);
  const auto total = static_cast<std::uint32_t>(shard_.labels_total);
  for (std::int64_t i = 0; i < config_.extras; i += 4) {
    const auto words = random(batch.step(), static_cast<std::uint64_t>(i / 4));
    for (std::int64_t j = i; j < std::min(i + 4, config_.extras); ++j) {
      const std::int64_t label = Philox::below(words[static_cast<std::size_t>(j - i)], total);
      if (label >= shard_.begin && label < shard_.end) drawn_.push_back(static_cast<std::int32_t>(label - shard_.begin));
    }
  }
  std::sort(drawn_.begin(), drawn_.end());
  drawn_.erase(std::unique(drawn_.begin(), drawn_.end()), drawn_.end());

  const auto [first, last] = batch.own(shard_.begin, shard_.end);
  auto pair = first;
  auto draw = drawn_.begin();
  while (pair != last || draw != drawn_.end()) {  // merges two ascending lists
    const std::int32_t from_pair = pair == last ? INT32_MAX : static_cast<std::int32_t>(pair->label - shard_.begin);
    const std::int32_t from_draw = draw == drawn_.end() ? INT32_MAX : *draw;
    const std::int32_t row = std::min(from_pair, from_draw);
    const auto position = static_cast<std::int32_t>(active.rows.size());
    active.rows.push_back(row);
    if (config_.log_q) active.log_q.push_back(log_q_[static_cast<std::size_t>(row)]);
    if (config_.own_only) active.own_only.push_back(from_draw != row);
    if (from_draw == row) ++draw;
    for (; pair != last && pair->label - shard_.begin == row; ++pair) active.own.push_back({position, pair->point});
  }
  active.row_count = active.rows.size();
}

}  // namespace dslide
