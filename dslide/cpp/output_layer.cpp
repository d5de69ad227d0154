#include "output_layer.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "init.hpp"
#include "kernels.hpp"

namespace dslide {

OutputLayer::OutputLayer(Pool& pool, const OutputConfig& config) : pool_(pool), config_(config) {
  const Shard& shard = config.shard;
  if (shard.begin < 0 || shard.end < shard.begin || shard.end > shard.labels_total || config.hidden < 1)
    throw std::invalid_argument("output layer: impossible shape");
  if (shard.labels_total > std::numeric_limits<std::int32_t>::max())
    throw std::invalid_argument("output layer: more than 2^31 - 1 labels");
  if (config.half && config.hidden % 2 != 0) throw std::invalid_argument("output layer: bfloat16 needs an even width");
  weights_.reset(shard.size(), config.hidden, config.half);
  products_.reset(config.hidden, config.half, pool.threads());
  fill_normal(pool, Philox(config.seed, Purpose::kOutputWeights), shard.begin, shard.size(), 0, config.hidden,
              config.init_std, weights_);
  bias_.reset(config.bias ? static_cast<std::size_t>(shard.size()) : 0);
  if (config.bias)
    fill_normal(pool, Philox(config.seed, Purpose::kOutputBias), shard.begin, shard.size(), 0, 1, config.init_std,
                bias_.data(), 1);
  scratch_.resize(static_cast<std::size_t>(pool.threads()));
}

void OutputLayer::set_optimizer(const Optimizer& optimizer) {
  state_.reset(optimizer, config_.shard.size(), config_.hidden, config_.hidden, config_.hidden,
               config_.half);
  bias_state_.reset(optimizer, config_.bias ? config_.shard.size() : 0, 1, 1, 1);
}

void OutputLayer::class_mean_init(const Csr& x, const Csr& y, const InputConfig& input) {
  constexpr std::int64_t kMostUnits = 32;
  constexpr std::int64_t kLabels = 65536;  // labels whose sums a thread holds in float32, where the table doesn't
  // Units whose sums are made together, by a thread from a copy of their part of the input layer. It and the sums are the
  // most that a run needs beside its weights: of large layers in bfloat16 half as many.
  const std::int64_t block_units = config_.half && x.columns > kLabels ? kMostUnits / 2 : kMostUnits;
  const std::int64_t begin = config_.shard.begin, end = config_.shard.end, hidden = config_.hidden;
  if (input.hidden_total != hidden || x.rows != y.rows)
    throw std::invalid_argument("class mean initialisation: shapes differ");
  std::vector<std::int64_t> counts(static_cast<std::size_t>(end - begin), 0);
  for (std::int64_t i = 0; i < y.indptr[y.rows]; ++i)
    if (y.indices[i] >= begin && y.indices[i] < end) ++counts[static_cast<std::size_t>(y.indices[i] - begin)];
  const auto count = [&](std::int64_t label) { return counts[static_cast<std::size_t>(label - begin)]; };

  const std::int64_t blocks = (hidden + block_units - 1) / block_units;
  const std::int64_t some = config_.half ? std::min(kLabels, end - begin) : end - begin;
  const std::ptrdiff_t ld = config_.half ? block_units : hidden;
  const Philox weights(input.seed, Purpose::kInputWeights), biases(input.seed, Purpose::kInputBias);
  pool_.run([&](int thread) {
    Buffer<float> table(static_cast<std::size_t>(x.columns * block_units));
    Buffer<float> part(config_.half ? static_cast<std::size_t>(some * block_units) : 0);
    for (std::int64_t block = thread; block < blocks; block += pool_.threads()) {  // a block's columns are its own
      const std::int64_t u0 = block * block_units, u1 = std::min(u0 + block_units, hidden), width = u1 - u0;
      fill_normal(weights, 0, x.columns, u0, u1, input.init_std, table.data(), block_units);
      float bias[kMostUnits] = {}, h[kMostUnits] = {};
      double total[kMostUnits] = {};
      if (input.bias) fill_normal(biases, 0, 1, u0, u1, input.init_std, bias, block_units);
      for (std::int64_t first = begin; first < end; first += some) {
        const std::int64_t last = std::min(first + some, end);
        float* sums = config_.half ? part.data() : weights_.floats().data() + u0;
        const auto row_of = [&](std::int64_t label) { return sums + (label - first) * ld; };
        for (std::int64_t label = first; label < last; ++label)
          if (count(label) > 0) std::fill_n(row_of(label), width, 0.0f);
        for (std::int64_t p = 0; p < x.rows; ++p) {
          const std::int64_t from = x.indptr[p];
          bool wanted = first == begin;  // the first time all points, for their total
          for (std::int64_t j = y.indptr[p]; j < y.indptr[p + 1]; ++j) {  // they arrive while h is computed
            if (y.indices[j] < first || y.indices[j] >= last) continue;
            __builtin_prefetch(row_of(y.indices[j]), 1);
            wanted = true;
          }
          if (!wanted) continue;
          kernels().weighted_sum(table.data(), block_units, x.indices + from, x.values + from, x.indptr[p + 1] - from, bias,
                                 h, block_units);
          for (std::int64_t i = 0; i < width; ++i) {
            h[i] = h[i] > 0.0f ? h[i] : input.slope * h[i];
            if (first == begin) total[i] += static_cast<double>(h[i]);
          }
          for (std::int64_t j = y.indptr[p]; j < y.indptr[p + 1]; ++j) {
            if (y.indices[j] < first || y.indices[j] >= last) continue;
            float* row = row_of(y.indices[j]);
            for (std::int64_t i = 0; i < width; ++i) row[i] += h[i];
          }
        }
        for (std::int64_t label = first; label < last; ++label) {
          const auto n = static_cast<double>(count(label));
          if (n == 0) continue;
          float* row = row_of(label);
          for (std::int64_t i = 0; i < width; ++i)
            row[i] -= static_cast<float>(n * total[i] / static_cast<double>(x.rows));
          if (config_.half) kernels().round(row, width, weights_.halves().data() + (label - begin) * hidden + u0);
        }
      }
    }
  });
  pool_.ranges(static_cast<std::size_t>(end - begin), 1, [&](std::size_t b, std::size_t e) {
    Buffer<float> copy(config_.half ? static_cast<std::size_t>(hidden) : 0);
    for (std::size_t l = b; l < e; ++l) {
      if (counts[l] == 0) continue;
      const auto r = static_cast<std::int64_t>(l);
      if (config_.half) kernels().expand(weights_.half_row(r), hidden, copy.data());
      float* row = config_.half ? copy.data() : weights_.floats().data() + r * hidden;
      double squares = 0.0;
      for (std::int64_t i = 0; i < hidden; ++i) squares += static_cast<double>(row[i]) * static_cast<double>(row[i]);
      if (squares == 0.0) continue;
      const auto scale = static_cast<float>(1.0 / std::sqrt(squares));
      for (std::int64_t i = 0; i < hidden; ++i) row[i] *= scale;
      if (config_.half) weights_.set(r, row);
    }
  });
}

std::pair<std::size_t, std::size_t> OutputLayer::own_range(std::size_t begin, std::size_t end) const {
  const auto below = [](const ActiveSet::Own& pair, std::size_t position) {
    return static_cast<std::size_t>(pair.position) < position;
  };
  const auto& own = active_.own;
  return {static_cast<std::size_t>(std::lower_bound(own.begin(), own.end(), begin, below) - own.begin()),
          static_cast<std::size_t>(std::lower_bound(own.begin(), own.end(), end, below) - own.begin())};
}

void OutputLayer::check_part(std::size_t first, std::size_t last) const {
  const bool whole = first == 0 && last == points_;
  if (whole || (active_.shared && first % kPartPoints == 0 && first <= last && last <= points_)) return;
  throw std::invalid_argument("output layer: not a part of the batch, or its points have active rows of their own");
}

void OutputLayer::forward(const Batch& batch, const float* h, Sampler& sampler, std::size_t first, std::size_t last,
                          float* lse) {
  if (first == 0) {
    update_rest(active_.row_count);
    forwarded_ = 0;
    sampler.select(batch, h, active_);
    h_ = h;
    points_ = batch.size();
    active_rows_ = active_.row_count;
    active_pairs_ = static_cast<std::int64_t>(active_.shared ? active_.row_count * points_ : active_.pair_points.size());
    if (active_.shared) update_all_waiting();  // of a batch whose points had rows of their own
    if (active_.shared && state_.optimizer().catches_up())
      pool_.ranges(active_.row_count, 1, [&](std::size_t begin, std::size_t end) {
        for (std::size_t position = begin; position < end; ++position) catch_up_row(active_.row(position));
      });
  }
  if (h != h_ || batch.size() != points_ || first != forwarded_)
    throw std::invalid_argument("output layer: forward takes the parts of one batch, in order");
  check_part(first, last);
  if (active_.shared) forward_shared(first, last, lse);
  else forward_pairs(h, points_, lse);
  forwarded_ = last;
}

double OutputLayer::backward(const Batch& batch, const float* lse, float* dh, bool weight_labels,
                             std::int64_t global_batch, std::size_t first, std::size_t last) {
  if (batch.size() != points_ || last > forwarded_) throw std::invalid_argument("backward needs the points of the last forward");
  check_part(first, last);
  const std::size_t padded = (points_ + 63) / 64 * 64;
  scale_.at_least(padded);
  target_.at_least(padded);
  for (std::size_t p = first; p < last; ++p) {
    const auto labels = static_cast<float>(batch.label_count(p));
    const float weight = weight_labels ? std::sqrt(labels) : 1.0f;
    // A point without labels has no target and no gradient.
    scale_[p] = labels > 0.0f ? weight / static_cast<float>(global_batch) : 0.0f;
    target_[p] = labels > 0.0f ? scale_[p] / labels : 0.0f;
  }
  if (!active_.shared) return backward_pairs(lse, points_, dh) * static_cast<double>(global_batch);
  const double loss = loss_shared(lse, first, last);
  products_.hidden_gradient(pool_, weights_, active_, first, last, gradient_shared(), dh);
  return loss * static_cast<double>(global_batch);
}

void OutputLayer::update(float lr, std::uint64_t step, bool may_wait) {
  begin_update(lr, step, may_wait);
  update_rest(active_.row_count);
}

void OutputLayer::begin_update(float lr, std::uint64_t step, bool may_wait) {
  update_rest(active_.row_count);
  WeightTable::Step now{rounding(), step, state_.optimizer().step_size(lr, step)};
  if (active_.shared) {
    products_.pack_points(pool_, h_, static_cast<std::ptrdiff_t>(points_));  // h may change before all rows are done
    begun_ = {now, 0};
    return;
  }
  // The activations of both batches should stay in the second cache while rows pass.
  constexpr std::size_t kMostWaiting = std::size_t{128} << 10;
  now.finished = may_wait && points_ * static_cast<std::size_t>(config_.hidden) * sizeof(float) <= kMostWaiting;
  wait_pairs(now);
  if (!now.finished) update_all_waiting();
  state_.finish_step(now.size, step);
  bias_state_.finish_step(now.size, step);
}

bool OutputLayer::update_some() {
  // Some 20 us, since messages only move on between two pieces.
  constexpr std::size_t kPieceRows = 2 * OutputProducts::kUpdateRows;
  if (!begun_.step) return false;
  update_rest(kPieceRows * static_cast<std::size_t>(pool_.threads()));
  return true;
}

void OutputLayer::update_rest(std::size_t most) {
  if (!begun_.step) return;
  const WeightTable::Step& now = *begun_.step;
  const std::size_t first = begun_.position, last = std::min(first + most, active_.row_count);
  update_shared(now, first, last);
  begun_.position = last;
  if (last < active_.row_count) return;
  if (state_.optimizer().dense()) update_inactive(now);
  state_.finish_step(now.size, now.number);
  bias_state_.finish_step(now.size, now.number);
  begun_.step.reset();
}

void OutputLayer::settle() {
  update_rest(active_.row_count);
  update_all_waiting();
  weights_.settle(state_, rounding(), pool_);
  bias_state_.settle(pool_, bias_.data());
}

void OutputLayer::catch_up_row(std::int32_t row) {
  weights_.catch_up(state_, rounding(), row);
  if (config_.bias) bias_state_.catch_up(row, bias_.data() + row);
}

void OutputLayer::update_row(std::int32_t row, const float* g, float bias_gradient, const WeightTable::Step& step) {
  weights_.update(state_, step, row, g);
  if (config_.bias) bias_state_.update(row, bias_.data() + row, g == nullptr ? nullptr : &bias_gradient, step.size, step.finished);
}

void OutputLayer::update_inactive(const WeightTable::Step& step) {
  if (active_.all) return;
  pool_.ranges(static_cast<std::size_t>(config_.shard.size()), 1, [&](std::size_t begin, std::size_t end) {
    auto next = std::lower_bound(active_.rows.begin(), active_.rows.end(), static_cast<std::int32_t>(begin));
    for (std::size_t row = begin; row < end; ++row) {
      if (next != active_.rows.end() && static_cast<std::size_t>(*next) == row) ++next;
      else update_row(static_cast<std::int32_t>(row), nullptr, 0.0f, step);
    }
  });
}

}  // namespace dslide
