#include "approximate.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "kernels.hpp"

namespace dslide {

ApproximateTopK::ApproximateTopK(OutputLayer& layer, const Config& config) : layer_(layer), config_(config) {
  if (config.candidates < 1) throw std::invalid_argument("approximate top-k: the number of candidates must be positive");
  if (config.hash.l > std::numeric_limits<std::uint8_t>::max())
    throw std::invalid_argument("approximate top-k: at most 255 tables");
  const auto rows = static_cast<std::size_t>(layer.config().shard.size()), hidden = static_cast<std::size_t>(layer.config().hidden);
  const std::size_t width = hidden + 1;
  const bool bias = layer.config().bias;
  std::vector<double> mean(width, 0.0);
  std::vector<float> copy(hidden);
  for (std::size_t r = 0; r < rows; ++r) {
    const float* row = layer.weights().as_floats(static_cast<std::int64_t>(r), copy.data());
    for (std::size_t i = 0; i < hidden; ++i) mean[i] += static_cast<double>(row[i]) / static_cast<double>(rows);
    if (bias) mean[hidden] += static_cast<double>(layer.bias()[r]) / static_cast<double>(rows);
  }
  family_ = make_hash_family(static_cast<std::int64_t>(width), config.hash, config.seed);
  const auto tables = static_cast<std::size_t>(family_->tables());
  std::vector<std::uint32_t> codes(tables * rows);
  constexpr std::size_t kBlock = 16384;  // rows of which a copy is held
  std::vector<float> centred(std::min(kBlock, rows) * width);
  for (std::size_t r0 = 0; r0 < rows; r0 += kBlock) {
    const std::size_t count = std::min(kBlock, rows - r0);
    for (std::size_t r = 0; r < count; ++r) {
      const float* row = layer.weights().as_floats(static_cast<std::int64_t>(r0 + r), copy.data());
      float* to = centred.data() + r * width;
      for (std::size_t i = 0; i < hidden; ++i) to[i] = row[i] - static_cast<float>(mean[i]);
      to[hidden] = bias ? layer.bias()[r0 + r] - static_cast<float>(mean[hidden]) : 0.0f;
    }
    family_->hash(layer.pool(), centred.data(), count, codes.data() + r0, rows);
  }
  tables_.build(layer.pool(), codes.data(), rows, family_->tables(), family_->buckets(), static_cast<std::int64_t>(rows),
                HashTables::Policy::kFifo, config.seed, 0);
}

void ApproximateTopK::topk(const float* h, std::size_t points, int k, std::int32_t* ids, float* scores, double* lse) const {
  const Kernels& kern = kernels();
  const auto rows = static_cast<std::size_t>(layer_.config().shard.size()), hidden = static_cast<std::size_t>(layer_.config().hidden);
  const std::size_t width = hidden + 1;
  const auto places = static_cast<std::size_t>(k), tables = static_cast<std::size_t>(family_->tables());
  const auto most = static_cast<std::size_t>(config_.candidates);
  const auto begin_label = static_cast<std::int32_t>(layer_.config().shard.begin);
  std::vector<float> query(points * width);
  for (std::size_t p = 0; p < points; ++p) {
    std::copy_n(h + p * hidden, hidden, query.data() + p * width);
    query[p * width + hidden] = 1.0f;
  }
  std::vector<std::uint32_t> codes(tables * points);
  Pool& pool = layer_.pool();
  family_->hash(pool, query.data(), points, codes.data(), points);
  pool.ranges(points, 1, [&](std::size_t begin, std::size_t end) {
    std::vector<std::uint8_t> hits(rows, 0);
    std::vector<std::int32_t> found, order;
    std::vector<std::size_t> at(tables + 2);
    std::vector<float> score, copy(hidden);
    const WeightTable& weights = layer_.weights();
    const auto n = static_cast<std::ptrdiff_t>(hidden);
    for (std::size_t p = begin; p < end; ++p) {
      found.clear();
      for (std::size_t t = 0; t < tables; ++t) {
        const auto [first, last] = tables_.bucket(static_cast<int>(t), codes[t * points + p]);
        for (const std::int32_t* id = first; id != last; ++id)
          if (hits[static_cast<std::size_t>(*id)]++ == 0) found.push_back(*id);
      }
      // The cut: all rows with more than `least` hits, and of those with `least` the lowest ids.
      if (found.size() > most) {
        std::fill(at.begin(), at.end(), 0);
        for (const std::int32_t id : found) ++at[hits[static_cast<std::size_t>(id)]];
        std::size_t least = tables, above = 0;
        while (above + at[least] < most) above += at[least--];
        order.clear();
        for (const std::int32_t id : found)
          if (hits[static_cast<std::size_t>(id)] == least) order.push_back(id);
        const auto kept = static_cast<std::ptrdiff_t>(most - above);
        std::nth_element(order.begin(), order.begin() + (kept - 1), order.end());
        const std::int32_t last_id = order[static_cast<std::size_t>(kept - 1)];
        order.clear();
        for (const std::int32_t id : found) {
          const std::size_t h_id = hits[static_cast<std::size_t>(id)];
          hits[static_cast<std::size_t>(id)] = 0;
          if (h_id > least || (h_id == least && id <= last_id)) order.push_back(id);
        }
      } else {
        order = found;
        for (const std::int32_t id : found) hits[static_cast<std::size_t>(id)] = 0;
      }
      std::sort(order.begin(), order.end());  // rows are then read in the order of memory
      score.resize(order.size());
      if (weights.half()) {
        constexpr std::int32_t kFirst = 0;
        for (std::size_t i = 0; i < order.size(); ++i)
          kern.dots(h + p * hidden, weights.as_floats(order[i], copy.data()), 0, &kFirst, 1, &score[i], n);
      } else {
        kern.dots(h + p * hidden, weights.row(0), n, order.data(), static_cast<std::ptrdiff_t>(order.size()),
                  score.data(), n);
      }
      if (layer_.config().bias)
        for (std::size_t i = 0; i < order.size(); ++i) score[i] += layer_.bias()[static_cast<std::size_t>(order[i])];
      if (lse != nullptr) {
        float top = -std::numeric_limits<float>::infinity(), sum = 0.0f;
        kern.log_sum_update(score.data(), static_cast<std::ptrdiff_t>(score.size()), &top, &sum);
        lse[p] = static_cast<double>(top) + std::log(static_cast<double>(sum));
      }
      std::vector<std::size_t> best(order.size());
      for (std::size_t i = 0; i < best.size(); ++i) best[i] = i;
      const std::size_t taken = std::min(places, best.size());
      std::partial_sort(best.begin(), best.begin() + static_cast<std::ptrdiff_t>(taken), best.end(),
                        [&](std::size_t a, std::size_t b) { return score[a] > score[b] || (score[a] == score[b] && a < b); });
      for (std::size_t i = 0; i < places; ++i) {
        ids[p * places + i] = i < taken ? begin_label + order[best[i]] : -1;
        scores[p * places + i] = i < taken ? score[best[i]] : -std::numeric_limits<float>::infinity();
      }
    }
  });
}

}  // namespace dslide
