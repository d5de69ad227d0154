#include "hidden_layer.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels.hpp"
#include "philox.hpp"

namespace dslide {

HiddenLayer::HiddenLayer(OutputLayer& rows, const HiddenConfig& config) : rows_(rows), config_(config) {
  if (config.dropout < 0.0f || config.dropout >= 1.0f)
    throw std::invalid_argument("hidden layer: dropout must lie in [0, 1)");
  if (rows.config().shard.begin % 8 != 0 && width() > 0)
    throw std::invalid_argument("hidden layer: a shard must begin at a multiple of 8 units");
  if (rows.config().half) throw std::invalid_argument("hidden layer: its weights are in float32");
}

void HiddenLayer::pack_weights(PackedMatrix& packed) const {
  packed.resize(inputs(), width());
  rows_.pool().ranges(static_cast<std::size_t>(width()), static_cast<std::size_t>(kernels().nr),
                      [&](std::size_t begin, std::size_t end) {
    packed.pack_transposed(static_cast<std::ptrdiff_t>(begin), static_cast<std::ptrdiff_t>(end),
                           rows_.weights().floats().data(), inputs());
  });
}

// out [points, width] = W in + b. The products are padded, so that they are made beside `out`.
void HiddenLayer::multiply(const float* in, std::size_t points, const PackedMatrix& weights, float* out) const {
  const Kernels& kern = kernels();
  const auto mr = static_cast<std::size_t>(kern.mr), wide = static_cast<std::size_t>(width());
  const float* bias = rows_.config().bias ? rows_.bias().data() : nullptr;
  rows_.pool().ranges(points, mr, [&](std::size_t begin, std::size_t end) {
    Buffer<float> product(mr * static_cast<std::size_t>(weights.padded()));
    std::vector<const float*> a(mr);
    for (std::size_t p = begin; p < end; p += mr) {
      const std::size_t m = std::min(end - p, mr);
      for (std::size_t i = 0; i < m; ++i) a[i] = in + (p + i) * static_cast<std::size_t>(inputs());
      weights.multiply(static_cast<std::ptrdiff_t>(m), a.data(), 1, {0, inputs(), 0, weights.n()}, product.data(),
                       weights.padded(), false);
      for (std::size_t i = 0; i < m; ++i) {
        const float* from = product.data() + i * static_cast<std::size_t>(weights.padded());
        float* to = out + (p + i) * wide;
        for (std::size_t j = 0; j < wide; ++j) to[j] = from[j] + (bias != nullptr ? bias[j] : 0.0f);
      }
    }
  });
}

void HiddenLayer::predict(const float* in, std::size_t points, float* out) const {
  if (width() == 0) return;
  PackedMatrix packed;
  pack_weights(packed);
  multiply(in, points, packed, out);
  for (std::size_t i = 0; i < points * static_cast<std::size_t>(width()); ++i)
    out[i] = out[i] > 0.0f ? out[i] : config_.slope * out[i];
}

void HiddenLayer::forward(const Batch& batch, const float* in, Sampler* sampler, float* out) {
  in_ = in;
  points_ = batch.size();
  active_.clear();
  active_.all = true;
  active_.row_count = static_cast<std::size_t>(width());
  if (sampler != nullptr) sampler->select(batch, in, active_);
  rows_.pool().ranges(active_.row_count, 1, [&](std::size_t begin, std::size_t end) {
    if (!rows_.state().optimizer().catches_up()) return;
    for (std::size_t position = begin; position < end; ++position) {
      const std::int64_t row = active_.row(position);
      rows_.state().catch_up(row, rows_.weights().floats().data() + row * inputs());
      if (rows_.config().bias) rows_.bias_state().catch_up(row, rows_.bias().data() + row);
    }
  });
  if (active_.all) return forward_all(batch, in, out);
  list_by_point();
  forward_sampled(in, out);
}

void HiddenLayer::forward_all(const Batch& batch, const float* in, float* out) {
  const auto wide = static_cast<std::size_t>(width());
  derivative_.at_least(std::max<std::size_t>(1, points_ * wide));
  if (wide == 0) return;
  const Kernels& kern = kernels();
  pack_weights(packed_);
  multiply(in, points_, packed_, out);
  // As in the input layer: 16 bits a draw, eight draws a call, keyed by step, point and unit.
  const auto threshold = static_cast<std::uint32_t>(config_.dropout * 65536.0f + 0.5f);
  const float keep = 1.0f / (1.0f - config_.dropout);
  const Philox random(config_.seed, Purpose::kDropout);
  const auto group = static_cast<std::uint64_t>(rows_.config().shard.begin / 8);
  const auto groups = static_cast<std::ptrdiff_t>((wide + 7) / 8);
  rows_.pool().ranges(points_, 1, [&](std::size_t begin, std::size_t end) {
    Buffer<float> factors(static_cast<std::size_t>(8 * groups));
    for (std::size_t p = begin; p < end; ++p) {
      if (threshold > 0)
        kern.dropout(random.key(), batch.step() << 20 | group, static_cast<std::uint64_t>(batch.row(p)), groups,
                     threshold, keep, factors.data());
      kern.activate(out + p * wide, threshold > 0 ? factors.data() : nullptr, config_.slope,
                    derivative_.data() + p * wide, width());
    }
  });
}

// The active pairs by point, and where each of the pairs in the order of rows is among them.
void HiddenLayer::list_by_point() {
  if (active_.shared) {  // every row has every point
    active_.pair_indptr.resize(active_.row_count + 1);
    active_.pair_points.resize(active_.row_count * points_);
    for (std::size_t r = 0; r <= active_.row_count; ++r) active_.pair_indptr[r] = static_cast<std::int64_t>(r * points_);
    for (std::size_t i = 0; i < active_.pair_points.size(); ++i)
      active_.pair_points[i] = static_cast<std::int32_t>(i % points_);
  }
  point_indptr_.assign(points_ + 1, 0);
  for (const std::int32_t point : active_.pair_points) ++point_indptr_[static_cast<std::size_t>(point) + 1];
  for (std::size_t p = 0; p < points_; ++p) point_indptr_[p + 1] += point_indptr_[p];
  std::vector<std::int64_t> next(point_indptr_.begin(), point_indptr_.end() - 1);
  point_units_.resize(active_.pair_points.size());
  pair_place_.resize(active_.pair_points.size());
  for (std::size_t r = 0; r < active_.row_count; ++r)
    for (auto i = static_cast<std::size_t>(active_.pair_indptr[r]); i < static_cast<std::size_t>(active_.pair_indptr[r + 1]); ++i) {
      const std::int64_t place = next[static_cast<std::size_t>(active_.pair_points[i])]++;
      pair_place_[i] = place;
      point_units_[static_cast<std::size_t>(place)] = active_.row(r);
    }
}

void HiddenLayer::forward_sampled(const float* in, float* out) {
  const Kernels& kern = kernels();
  const auto wide = static_cast<std::size_t>(width());
  const float* bias = rows_.config().bias ? rows_.bias().data() : nullptr;
  derivative_.at_least(std::max<std::size_t>(1, point_units_.size()));
  delta_.at_least(std::max<std::size_t>(1, point_units_.size()));  // first the activations
  rows_.pool().ranges(points_, 1, [&](std::size_t begin, std::size_t end) {
    std::vector<float> scales(config_.scale != 1.0f ? wide : 0, config_.scale);
    for (std::size_t p = begin; p < end; ++p) {
      const auto from = static_cast<std::size_t>(point_indptr_[p]);
      const auto count = static_cast<std::ptrdiff_t>(point_indptr_[p + 1]) - static_cast<std::ptrdiff_t>(from);
      const std::int32_t* unit = point_units_.data() + from;
      float* h = delta_.data() + from;
      kern.dots(in + p * static_cast<std::size_t>(inputs()), rows_.weights().floats().data(), inputs(), unit, count, h,
                inputs());
      if (bias != nullptr)
        for (std::ptrdiff_t i = 0; i < count; ++i) h[i] += bias[unit[i]];
      kern.activate(h, scales.empty() ? nullptr : scales.data(), config_.slope, derivative_.data() + from, count);
      std::fill_n(out + p * wide, wide, 0.0f);
      for (std::ptrdiff_t i = 0; i < count; ++i) out[p * wide + static_cast<std::size_t>(unit[i])] = h[i];
    }
  });
}

void HiddenLayer::backward(const float* dout, float* din) {
  const Kernels& kern = kernels();
  const auto wide = static_cast<std::size_t>(width()), deep = static_cast<std::size_t>(inputs());
  if (wide == 0) {
    std::fill_n(din, points_ * deep, 0.0f);
    return;
  }
  if (!active_.all) {
    rows_.pool().ranges(points_, 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t p = begin; p < end; ++p) {
        const auto from = static_cast<std::size_t>(point_indptr_[p]), to = static_cast<std::size_t>(point_indptr_[p + 1]);
        for (std::size_t i = from; i < to; ++i)
          delta_[i] = dout[p * wide + static_cast<std::size_t>(point_units_[i])] * derivative_[i];
        kern.weighted_sum(rows_.weights().floats().data(), inputs(), point_units_.data() + from, delta_.data() + from,
                          static_cast<std::ptrdiff_t>(to - from), nullptr, din + p * deep, inputs());
      }
    });
    return;
  }
  const auto mr = static_cast<std::size_t>(kern.mr);
  delta_.at_least(points_ * wide);
  packed_.resize(width(), inputs());
  rows_.pool().ranges(wide, 16, [&](std::size_t begin, std::size_t end) {
    packed_.pack_rows(static_cast<std::ptrdiff_t>(begin), static_cast<std::ptrdiff_t>(end),
                      [&](std::ptrdiff_t row) { return rows_.weights().floats().data() + row * inputs(); });
  });
  rows_.pool().ranges(points_, mr, [&](std::size_t begin, std::size_t end) {
    Buffer<float> product(mr * static_cast<std::size_t>(packed_.padded()));
    std::vector<const float*> a(mr);
    for (std::size_t i = begin * wide; i < end * wide; ++i) delta_[i] = dout[i] * derivative_[i];
    for (std::size_t p = begin; p < end; p += mr) {
      const std::size_t m = std::min(end - p, mr);
      for (std::size_t i = 0; i < m; ++i) a[i] = delta_.data() + (p + i) * wide;
      packed_.multiply(static_cast<std::ptrdiff_t>(m), a.data(), 1, {0, width(), 0, packed_.n()}, product.data(),
                       packed_.padded(), false);
      for (std::size_t i = 0; i < m; ++i)
        std::copy_n(product.data() + i * static_cast<std::size_t>(packed_.padded()), deep, din + (p + i) * deep);
    }
  });
}

void HiddenLayer::update(float lr, std::uint64_t step) {
  const float step_size = rows_.state().optimizer().step_size(lr, step);
  if (active_.all) update_all(step_size);
  else update_sampled(step_size);
  rows_.state().finish_step(step_size, step);
  rows_.bias_state().finish_step(step_size, step);
}

void HiddenLayer::update_all(float step_size) {
  const auto wide = static_cast<std::size_t>(width()), mr = static_cast<std::size_t>(kernels().mr);
  if (wide == 0) return;
  packed_.resize(static_cast<std::ptrdiff_t>(points_), inputs());
  rows_.pool().ranges(points_, 16, [&](std::size_t begin, std::size_t end) {
    packed_.pack_rows(static_cast<std::ptrdiff_t>(begin), static_cast<std::ptrdiff_t>(end),
                      [&](std::ptrdiff_t p) { return in_ + p * inputs(); });
  });
  rows_.pool().ranges(wide, mr, [&](std::size_t begin, std::size_t end) {
    Buffer<float> g(mr * static_cast<std::size_t>(packed_.padded()));
    std::vector<const float*> a(mr);
    for (std::size_t r = begin; r < end; r += mr) {
      const std::size_t m = std::min(end - r, mr);
      for (std::size_t i = 0; i < m; ++i) a[i] = delta_.data() + r + i;
      packed_.multiply(static_cast<std::ptrdiff_t>(m), a.data(), width(), {0, packed_.k(), 0, packed_.n()}, g.data(),
                       packed_.padded(), false);
      for (std::size_t i = 0; i < m; ++i) {
        float bias_gradient = 0.0f;
        for (std::size_t p = 0; p < points_; ++p) bias_gradient += a[i][p * wide];
        update_row(static_cast<std::int64_t>(r + i), g.data() + i * static_cast<std::size_t>(packed_.padded()),
                   bias_gradient, step_size);
      }
    }
  });
}

void HiddenLayer::update_sampled(float step_size) {
  const bool dense = rows_.state().optimizer().dense();
  rows_.pool().ranges(static_cast<std::size_t>(width()), 1, [&](std::size_t begin, std::size_t end) {
    Buffer<float> g(static_cast<std::size_t>(inputs())), values(std::max<std::size_t>(1, points_));
    auto next = std::lower_bound(active_.rows.begin(), active_.rows.end(), static_cast<std::int32_t>(begin));
    for (std::size_t row = begin; row < end; ++row) {
      if (next == active_.rows.end() || static_cast<std::size_t>(*next) != row) {
        if (dense) update_row(static_cast<std::int64_t>(row), nullptr, 0.0f, step_size);
        continue;
      }
      const auto position = static_cast<std::size_t>(next++ - active_.rows.begin());
      const auto from = static_cast<std::size_t>(active_.pair_indptr[position]);
      const auto count = static_cast<std::size_t>(active_.pair_indptr[position + 1]) - from;
      float bias_gradient = 0.0f;
      for (std::size_t i = 0; i < count; ++i) {
        values[i] = delta_[static_cast<std::size_t>(pair_place_[from + i])];
        bias_gradient += values[i];
      }
      kernels().weighted_sum(in_, inputs(), active_.pair_points.data() + from, values.data(),
                             static_cast<std::ptrdiff_t>(count), nullptr, g.data(), inputs());
      update_row(static_cast<std::int64_t>(row), g.data(), bias_gradient, step_size);
    }
  });
}

void HiddenLayer::update_row(std::int64_t row, const float* gradient, float bias_gradient, float step_size) {
  rows_.state().update(row, rows_.weights().floats().data() + row * inputs(), gradient, step_size);
  if (rows_.config().bias)
    rows_.bias_state().update(row, rows_.bias().data() + row, gradient == nullptr ? nullptr : &bias_gradient, step_size);
}

std::int64_t HiddenLayer::active_pairs() const {
  if (!active_.all) return static_cast<std::int64_t>(point_units_.size());
  return static_cast<std::int64_t>(points_) * width();
}

}  // namespace dslide
