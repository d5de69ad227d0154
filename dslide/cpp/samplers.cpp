#include "samplers.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <stdexcept>

#include "philox.hpp"
#include "radix_sort.hpp"

namespace dslide {

void FullSampler::select(const Batch& batch, const float* /*h*/, ActiveSet& active) {
  active.clear();
  active.all = true;
  active.row_count = static_cast<std::size_t>(shard_.size());
  const auto [first, last] = batch.own(shard_.begin, shard_.end);
  for (auto pair = first; pair != last; ++pair)
    active.own.push_back({static_cast<std::int32_t>(pair->label - shard_.begin), pair->point});
}

InBatchSampler::InBatchSampler(const Shard& shard, const Config& config, const std::int64_t* counts, Proposer* proposer)
    : shard_(shard), config_(config), proposer_(proposer) {
  if (config.num_points < 1 || config.batch_size < 1 || config.extras < 0 || config.log_uniform < 0)
    throw std::invalid_argument("in-batch sampler: points and batch size must be positive, draws not negative");
  const double n = static_cast<double>(config.num_points), labels = static_cast<double>(shard.labels_total);
  std::vector<double> log_miss(static_cast<std::size_t>(shard.size()), 0.0);
  if (config.extras > 0)
    std::fill(log_miss.begin(), log_miss.end(), static_cast<double>(config.extras) * std::log1p(-1.0 / labels));
  if (config.log_uniform > 0) {
    by_rank_.resize(static_cast<std::size_t>(shard.labels_total));
    std::iota(by_rank_.begin(), by_rank_.end(), 0);
    std::sort(by_rank_.begin(), by_rank_.end(), [&](std::int32_t a, std::int32_t b) {
      return counts[a] != counts[b] ? counts[a] > counts[b] : a < b;
    });
    for (std::size_t rank = 0; rank < by_rank_.size(); ++rank) {
      const std::int64_t label = by_rank_[rank];
      if (label < shard.begin || label >= shard.end) continue;
      const double p = std::log1p(1.0 / (static_cast<double>(rank) + 1.0)) / std::log1p(labels);
      log_miss[static_cast<std::size_t>(label - shard.begin)] += static_cast<double>(config.log_uniform) * std::log1p(-p);
    }
  }
  if (!config.log_q) return;
  log_q_.resize(log_miss.size());
  for (std::size_t i = 0; i < log_q_.size(); ++i) {
    // A label that no point has is never drawn as one; half a point keeps its logarithm finite.
    const double f = std::max(0.5, static_cast<double>(counts[shard.begin + static_cast<std::int64_t>(i)]));
    if (!config.own_only)
      log_miss[i] += static_cast<double>(std::max<std::int64_t>(1, config.batch_size - 1)) * std::log1p(-std::min(f / n, 1.0));
    log_q_[i] = static_cast<float>(std::log(-std::expm1(log_miss[i])));
    if (!std::isfinite(log_q_[i])) log_q_[i] = 0.0f;  // own_only without draws: no negatives but proposed ones
  }
}

void InBatchSampler::draw_uniform(std::uint64_t step) {
  const Philox random(config_.seed, Purpose::kUniformExtras);
  const auto total = static_cast<std::uint32_t>(shard_.labels_total);
  for (std::int64_t i = 0; i < config_.extras; i += 4) {
    const auto words = random(step, static_cast<std::uint64_t>(i / 4));
    for (std::int64_t j = i; j < std::min(i + 4, config_.extras); ++j) {
      const std::int64_t label = Philox::below(words[static_cast<std::size_t>(j - i)], total);
      if (label >= shard_.begin && label < shard_.end) drawn_.push_back(static_cast<std::int32_t>(label - shard_.begin));
    }
  }
}

// Rank floor((L + 1)^u) - 1 for uniform u: log(rank + 1) is spread evenly.
void InBatchSampler::draw_log_uniform(std::uint64_t step) {
  const Philox random(config_.seed, Purpose::kLogUniformExtras);
  const double range = std::log1p(static_cast<double>(shard_.labels_total));
  for (std::int64_t i = 0; i < config_.log_uniform; i += 4) {
    const auto words = random(step, static_cast<std::uint64_t>(i / 4));
    for (std::int64_t j = i; j < std::min(i + 4, config_.log_uniform); ++j) {
      const double u = (static_cast<double>(words[static_cast<std::size_t>(j - i)]) + 0.5) / 4294967296.0;
      const auto rank = std::min(static_cast<std::int64_t>(std::exp(u * range)), shard_.labels_total) - 1;
      const std::int64_t label = by_rank_[static_cast<std::size_t>(rank)];
      if (label >= shard_.begin && label < shard_.end) drawn_.push_back(static_cast<std::int32_t>(label - shard_.begin));
    }
  }
}

void InBatchSampler::select(const Batch& batch, const float* h, ActiveSet& active) {
  const auto unique = [this](std::vector<std::int32_t>& rows) {
    radix_sort(rows, sorted_, [](std::int32_t row) { return row; });
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  };
  active.clear();
  drawn_.clear();
  proposed_.clear();
  if (config_.extras > 0) draw_uniform(batch.step());
  if (config_.log_uniform > 0) draw_log_uniform(batch.step());
  if (proposer_ != nullptr) {
    proposer_->propose(batch, h, proposed_);
    unique(proposed_);
    drawn_.insert(drawn_.end(), proposed_.begin(), proposed_.end());
  }
  unique(drawn_);

  const auto [first, last] = batch.own(shard_.begin, shard_.end);
  const std::size_t most = static_cast<std::size_t>(last - first) + drawn_.size();
  active.rows.resize(most);
  active.log_q.resize(config_.log_q ? most : 0);
  active.own_only.resize(config_.own_only ? most : 0);
  active.own.resize(static_cast<std::size_t>(last - first));
  constexpr std::ptrdiff_t kAhead = 32;  // pairs and draws whose corrections are on their way
  auto pair = first;
  auto draw = drawn_.begin();
  auto proposal = proposed_.begin();
  auto own = active.own.begin();
  std::size_t position = 0;
  for (; pair != last || draw != drawn_.end(); ++position) {  // merges ascending lists
    const std::int32_t from_pair = pair == last ? INT32_MAX : static_cast<std::int32_t>(pair->label - shard_.begin);
    const std::int32_t from_draw = draw == drawn_.end() ? INT32_MAX : *draw;
    const std::int32_t row = std::min(from_pair, from_draw);
    const bool certain = proposal != proposed_.end() && *proposal == row;
    active.rows[position] = row;
    if (config_.log_q) {
      if (last - pair > kAhead) __builtin_prefetch(&log_q_[static_cast<std::size_t>(pair[kAhead].label - shard_.begin)]);
      if (drawn_.end() - draw > kAhead) __builtin_prefetch(&log_q_[static_cast<std::size_t>(draw[kAhead])]);
      active.log_q[position] = certain ? 0.0f : log_q_[static_cast<std::size_t>(row)];
    }
    if (config_.own_only) active.own_only[position] = from_draw != row;
    if (from_draw == row) ++draw;
    if (certain) ++proposal;
    for (; pair != last && pair->label - shard_.begin == row; ++pair) *own++ = {static_cast<std::int32_t>(position), pair->point};
  }
  active.rows.resize(position);
  active.log_q.resize(config_.log_q ? position : 0);
  active.own_only.resize(config_.own_only ? position : 0);
  active.row_count = active.rows.size();
}

}  // namespace dslide
