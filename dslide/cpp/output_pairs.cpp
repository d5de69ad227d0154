// The output layer where each point has its own active rows (lsh): every active row meets the points that activated it.
// Logits are kept by pair, in the order of rows and, within a row, of points.
#include <algorithm>
#include <numeric>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {

void OutputLayer::forward_pairs(const float* h, std::size_t points, float* lse) {
  const Kernels& kern = kernels();
  const std::size_t rows = active_.row_count, pairs = active_.pair_points.size();
  logits_.at_least(std::max<std::size_t>(1, pairs));
  pair_own_.assign(pairs, 0);
  pool_.ranges(rows, 1, [&](std::size_t begin, std::size_t end) {
    auto [own, own_end] = own_range(begin, end);
    for (std::size_t r = begin; r < end; ++r) {
      const auto from = active_.pair_indptr[r], to = active_.pair_indptr[r + 1];
      const std::int32_t row = active_.row(r);
      if (r + 2 < end) __builtin_prefetch(row_weights(active_.row(r + 2)));
      kern.dots(row_weights(row), h, config_.hidden, active_.pair_points.data() + from, to - from,
                logits_.data() + from, config_.hidden);
      if (config_.bias)
        for (auto i = from; i < to; ++i) logits_[static_cast<std::size_t>(i)] += bias_[static_cast<std::size_t>(row)];
      auto pair = active_.pair_points.begin() + from;
      for (; own < own_end && static_cast<std::size_t>(active_.own[own].position) == r; ++own) {
        pair = std::lower_bound(pair, active_.pair_points.begin() + to, active_.own[own].point);
        pair_own_[static_cast<std::size_t>(pair - active_.pair_points.begin())] = 1;
      }
    }
  });
  // By point, so that each point's sums have one order.
  point_indptr_.assign(points + 1, 0);
  for (const std::int32_t point : active_.pair_points) ++point_indptr_[static_cast<std::size_t>(point) + 1];
  std::partial_sum(point_indptr_.begin(), point_indptr_.end(), point_indptr_.begin());
  point_pairs_.resize(pairs);
  std::vector<std::int64_t> cursor(point_indptr_.begin(), point_indptr_.end());
  for (std::size_t i = 0; i < pairs; ++i)
    point_pairs_[static_cast<std::size_t>(cursor[static_cast<std::size_t>(active_.pair_points[i])]++)] =
        static_cast<std::int64_t>(i);
  copy_.at_least(std::max<std::size_t>(1, pairs));
  pool_.ranges(points, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t p = begin; p < end; ++p) {
      const std::int64_t from = point_indptr_[p], to = point_indptr_[p + 1];
      for (std::int64_t i = from; i < to; ++i)
        copy_[static_cast<std::size_t>(i)] = logits_[static_cast<std::size_t>(point_pairs_[static_cast<std::size_t>(i)])];
      lse[p] = kern.log_sum_exp(copy_.data() + from, to - from);
    }
  });
}

void OutputLayer::gradient_pairs(const float* lse, double* loss_parts) {
  const Kernels& kern = kernels();
  const std::size_t tile = tile_rows();
  pool_.ranges(active_.row_count, tile, [&](std::size_t first, std::size_t last) {
    std::vector<float> shift, scale;
    for (std::size_t t0 = first; t0 < last; t0 += tile) {
      const std::size_t t1 = std::min(t0 + tile, last);
      const auto from = static_cast<std::size_t>(active_.pair_indptr[t0]), to = static_cast<std::size_t>(active_.pair_indptr[t1]);
      shift.resize(to - from);
      scale.resize(to - from);
      double loss = 0.0;
      for (std::size_t i = from; i < to; ++i) {
        const auto point = static_cast<std::size_t>(active_.pair_points[i]);
        shift[i - from] = lse[point];
        scale[i - from] = scale_[point];
        if (pair_own_[i]) loss += static_cast<double>(target_[point]) * static_cast<double>(lse[point] - logits_[i]);
      }
      loss_parts[t0 / tile] = loss;
      kern.softmax_gradient(logits_.data() + from, shift.data(), scale.data(), static_cast<std::ptrdiff_t>(to - from));
      for (std::size_t i = from; i < to; ++i)
        if (pair_own_[i]) logits_[i] -= target_[static_cast<std::size_t>(active_.pair_points[i])];
    }
  });
}

void OutputLayer::hidden_gradient_pairs(std::size_t points, float* dh) {
  // Rows are cut into a fixed number of parts with a sum each, added in order: no races, and the same result for any
  // number of threads.
  constexpr int kParts = 16;
  const Kernels& kern = kernels();
  const std::size_t size = points * static_cast<std::size_t>(config_.hidden);
  copy_.at_least(kParts * size);
  const std::int64_t pairs = static_cast<std::int64_t>(active_.pair_points.size());
  const auto cut = [&](int part) {
    const auto at = std::lower_bound(active_.pair_indptr.begin(), active_.pair_indptr.end(), pairs * part / kParts);
    return part == kParts ? active_.row_count
                          : std::min(active_.row_count, static_cast<std::size_t>(at - active_.pair_indptr.begin()));
  };
  pool_.run([&](int thread) {
    for (int part = thread; part < kParts; part += pool_.threads()) {
      float* sum = copy_.data() + static_cast<std::size_t>(part) * size;
      std::fill_n(sum, size, 0.0f);
      for (std::size_t r = cut(part); r < cut(part + 1); ++r) {
        const auto from = active_.pair_indptr[r];
        kern.scatter_add(row_weights(active_.row(r)), sum, config_.hidden, active_.pair_points.data() + from,
                         logits_.data() + from, active_.pair_indptr[r + 1] - from, config_.hidden);
      }
    }
  });
  pool_.ranges(size, 64, [&](std::size_t begin, std::size_t end) {
    std::fill(dh + begin, dh + end, 0.0f);
    for (int part = 0; part < kParts; ++part)
      kern.axpy(1.0f, copy_.data() + static_cast<std::size_t>(part) * size + begin, dh + begin,
                static_cast<std::ptrdiff_t>(end - begin));
  });
}

void OutputLayer::update_pairs(float step_size) {
  const Kernels& kern = kernels();
  const std::int64_t pairs = static_cast<std::int64_t>(active_.pair_points.size());
  pool_.run([&](int thread) {
    const auto cut = [&](int t) {
      const auto at = std::lower_bound(active_.pair_indptr.begin(), active_.pair_indptr.end(), pairs * t / pool_.threads());
      return t == pool_.threads() ? active_.row_count
                                  : std::min(active_.row_count, static_cast<std::size_t>(at - active_.pair_indptr.begin()));
    };
    float* g = scratch_[static_cast<std::size_t>(thread)].at_least(static_cast<std::size_t>(config_.hidden));
    for (std::size_t r = cut(thread); r < cut(thread + 1); ++r) {
      const auto from = active_.pair_indptr[r], to = active_.pair_indptr[r + 1];
      kern.weighted_sum(h_, config_.hidden, active_.pair_points.data() + from, logits_.data() + from, to - from, nullptr,
                        g, config_.hidden);
      float bias_gradient = 0.0f;
      for (auto i = from; i < to; ++i) bias_gradient += logits_[static_cast<std::size_t>(i)];
      update_row(active_.row(r), g, bias_gradient, step_size);
    }
  });
}

}  // namespace dslide
