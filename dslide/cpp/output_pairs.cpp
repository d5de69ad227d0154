// The output layer where each point has its own active rows (lsh): every active row meets the points that activated it.
// Logits are kept by pair, in the order of rows and, within a row, of points.
//
// The rows are cut into kParts parts, each worked on by one thread, and what a point gets from several parts (log-sum-exp,
// hidden gradient) is added up in their order: no races, and the same result for any number of threads. A row comes from
// memory, so the next ones are asked for ahead of time; what is kept by point stays in the cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {
namespace {

constexpr int kParts = 16;
constexpr std::size_t kAhead = 4;  // rows that are on their way from memory

}  // namespace

// First row of a part: parts cost about the same, a row about as much as kRowCost pairs.
std::size_t OutputLayer::part_begin(int part) const {
  constexpr std::int64_t kRowCost = 8;
  const auto& indptr = active_.pair_indptr;
  const auto cost = [&](std::size_t row) { return indptr[row] + kRowCost * static_cast<std::int64_t>(row); };
  const std::int64_t goal = cost(active_.row_count) * part / kParts;
  std::size_t low = 0, high = active_.row_count;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (cost(middle) < goal) low = middle + 1;
    else high = middle;
  }
  return low;
}

void OutputLayer::for_parts(const std::function<void(int, std::size_t, std::size_t)>& body) {
  pool_.run([&](int thread) {
    for (int part = thread; part < kParts; part += pool_.threads()) body(part, part_begin(part), part_begin(part + 1));
  });
}

void OutputLayer::forward_pairs(const float* h, std::size_t points, float* lse) {
  constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  const Kernels& kern = kernels();
  const bool catches_up = state_.optimizer().catches_up();
  const std::size_t pairs = active_.pair_points.size(), hidden = static_cast<std::size_t>(config_.hidden);
  logits_.at_least(std::max<std::size_t>(1, pairs));
  part_max_.at_least(kParts * std::max<std::size_t>(1, points));
  part_sum_.at_least(kParts * std::max<std::size_t>(1, points));
  own_logits_.resize(active_.own.size());
  own_pairs_.resize(active_.own.size());
  for_parts([&](int part, std::size_t begin, std::size_t end) {
    float* max = part_max_.data() + static_cast<std::size_t>(part) * points;
    float* sum = part_sum_.data() + static_cast<std::size_t>(part) * points;
    std::fill_n(max, points, kMinusInf);
    std::fill_n(sum, points, 0.0f);
    Buffer<float> copy(config_.half ? hidden : 0);
    std::size_t own = own_range(begin, end).first;
    for (std::size_t r = begin; r < end; ++r) {
      prefetch_weights(r + kAhead, end);
      if (catches_up) {
        if (r + kAhead < end) state_.prefetch_missed(active_.row(r + kAhead));
        catch_up_row(active_.row(r));
      }
      const std::int64_t from = active_.pair_indptr[r], count = active_.pair_indptr[r + 1] - from;
      const std::int32_t* point = active_.pair_points.data() + from;
      float* logit = logits_.data() + from;
      kern.dots(weights_.as_floats(active_.row(r), copy.data()), h, config_.hidden, point, count, logit, config_.hidden);
      const float bias = config_.bias ? bias_[static_cast<std::size_t>(active_.row(r))] : 0.0f;
      for (std::int64_t i = 0; i < count; ++i) {
        logit[i] += bias;
        max[point[i]] = std::max(max[point[i]], logit[i]);
      }
      for (; own < active_.own.size() && static_cast<std::size_t>(active_.own[own].position) == r; ++own) {
        const std::int64_t i = std::lower_bound(point, point + count, active_.own[own].point) - point;
        own_pairs_[own] = from + i;
        own_logits_[own] = logit[i];
      }
    }
    const std::int64_t from = active_.pair_indptr[begin];
    kern.exp_pairs(logits_.data() + from, active_.pair_points.data() + from, active_.pair_indptr[end] - from, max, sum);
  });
  const auto ld = static_cast<std::ptrdiff_t>(points);
  kern.combine_log_sum(part_max_.data(), part_sum_.data(), kParts, ld, ld, lse);
}

double OutputLayer::backward_pairs(const float* lse, std::size_t points, float* dh) {
  const Kernels& kern = kernels();
  const std::size_t hidden = static_cast<std::size_t>(config_.hidden), size = points * hidden;
  copy_.at_least(kParts * std::max<std::size_t>(1, size));
  double losses[kParts] = {};
  for_parts([&](int part, std::size_t begin, std::size_t end) {
    // exp(logit - max) becomes the softmax's share of the gradient.
    float* factor = part_max_.data() + static_cast<std::size_t>(part) * points;
    for (std::size_t p = 0; p < points; ++p)
      factor[p] = std::isinf(factor[p]) ? 0.0f : scale_[p] * std::exp(factor[p] - lse[p]);
    float* sum = copy_.data() + static_cast<std::size_t>(part) * size;
    std::fill_n(sum, size, 0.0f);
    Buffer<float> copy(config_.half ? hidden : 0);
    std::size_t own = own_range(begin, end).first;
    for (std::size_t r = begin; r < end; ++r) {
      prefetch_weights(r + kAhead, end);
      const std::int64_t from = active_.pair_indptr[r], count = active_.pair_indptr[r + 1] - from;
      const std::int32_t* point = active_.pair_points.data() + from;
      float* gradient = logits_.data() + from;
      for (std::int64_t i = 0; i < count; ++i) gradient[i] *= factor[point[i]];
      for (; own < active_.own.size() && static_cast<std::size_t>(active_.own[own].position) == r; ++own) {
        const auto p = static_cast<std::size_t>(active_.own[own].point);
        logits_[static_cast<std::size_t>(own_pairs_[own])] -= target_[p];
        losses[part] += static_cast<double>(target_[p]) * static_cast<double>(lse[p] - own_logits_[own]);
      }
      kern.scatter_add(weights_.as_floats(active_.row(r), copy.data()), sum, config_.hidden, point, gradient, count, config_.hidden);
    }
  });
  sum_parts(pool_, copy_.data(), kParts, points, hidden, hidden, dh);
  double loss = 0.0;
  for (const double part : losses) loss += part;
  return loss;
}

void OutputLayer::update_pairs(const WeightTable::Step& step) {
  const Kernels& kern = kernels();
  pool_.run([&](int thread) {
    const auto hidden = static_cast<std::size_t>(config_.hidden);
    float* g = scratch_[static_cast<std::size_t>(thread)].at_least(hidden);
    for (int part = thread; part < kParts; part += pool_.threads()) {
      const std::size_t end = part_begin(part + 1);
      for (std::size_t r = part_begin(part); r < end; ++r) {
        prefetch_weights(r + kAhead, end);
        if (r + kAhead < end) state_.prefetch(active_.row(r + kAhead));
        const std::int64_t from = active_.pair_indptr[r], to = active_.pair_indptr[r + 1];
        kern.weighted_sum(h_, config_.hidden, active_.pair_points.data() + from, logits_.data() + from, to - from,
                          nullptr, g, config_.hidden);
        float bias_gradient = 0.0f;
        for (std::int64_t i = from; i < to; ++i) bias_gradient += logits_[static_cast<std::size_t>(i)];
        update_row(active_.row(r), g, bias_gradient, step);
      }
    }
  });
}

}  // namespace dslide
