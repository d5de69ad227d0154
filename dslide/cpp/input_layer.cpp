#include "input_layer.hpp"

#include <algorithm>
#include <stdexcept>

#include "init.hpp"
#include "kernels.hpp"

namespace dslide {

InputLayer::InputLayer(Pool& pool, const InputConfig& config)
    : pool_(pool), config_(config), ld_(static_cast<std::ptrdiff_t>(config.hidden_end - config.hidden_begin)) {
  if (config.features < 1 || config.hidden_begin < 0 || config.hidden_end < config.hidden_begin ||
      config.hidden_end > config.hidden_total)
    throw std::invalid_argument("input layer: impossible shape");
  if (config.state_block < 1 || config.hidden_begin % config.state_block != 0)
    throw std::invalid_argument("input layer: a shard must begin on a border of state blocks");
  if (config.dropout < 0.0f || config.dropout >= 1.0f)
    throw std::invalid_argument("input layer: dropout must lie in [0, 1)");
  weights_.reset(static_cast<std::size_t>(config.features * ld_));
  fill_normal(pool, Philox(config.seed, Purpose::kInputWeights), 0, config.features, config.hidden_begin,
              config.hidden_end, config.init_std, weights_.data(), ld_);
  bias_.reset(config.bias ? static_cast<std::size_t>(ld_) : 0);
  if (config.bias)
    fill_normal(Philox(config.seed, Purpose::kInputBias), 0, 1, config.hidden_begin, config.hidden_end,
                config.init_std, bias_.data(), ld_);
  scratch_.resize(static_cast<std::size_t>(pool.threads()));
  for (auto& buffer : scratch_) buffer.reset(static_cast<std::size_t>(ld_));
}

void InputLayer::set_optimizer(const Optimizer& optimizer) {
  state_.reset(optimizer, config_.features, ld_, ld_, config_.state_block);
  bias_state_.reset(optimizer, config_.bias ? 1 : 0, ld_, ld_, config_.state_block);
}

void InputLayer::forward(const Batch& batch, float* out, bool train) {
  if (ld_ == 0) return;
  const Kernels& kern = kernels();
  const Csr& x = batch.x();
  const float keep = 1.0f / (1.0f - config_.dropout);
  // Eight 16-bit draws a call; a unit is dropped where its draw lies below this.
  const auto threshold = static_cast<std::uint32_t>(config_.dropout * 65536.0f + 0.5f);
  const Philox random(config_.seed, Purpose::kDropout);
  if (train) derivative_.at_least(batch.size() * static_cast<std::size_t>(ld_));
  pool_.ranges(batch.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t p = begin; p < end; ++p) {
      const std::int64_t row = batch.row(p), from = x.indptr[row];
      float* h = out + static_cast<std::ptrdiff_t>(p) * ld_;
      kern.weighted_sum(weights_.data(), ld_, x.indices + from, x.values + from, x.indptr[row + 1] - from,
                        config_.bias ? bias_.data() : nullptr, h, ld_);
      if (!train) {
        for (std::ptrdiff_t i = 0; i < ld_; ++i) h[i] = h[i] > 0.0f ? h[i] : config_.slope * h[i];
        continue;
      }
      float* d = derivative_.data() + static_cast<std::ptrdiff_t>(p) * ld_;
      for (std::ptrdiff_t i = 0; i < ld_; ++i) d[i] = h[i] > 0.0f ? 1.0f : config_.slope;
      if (threshold > 0) {
        for (std::int64_t u = config_.hidden_begin / 8 * 8; u < config_.hidden_end; u += 8) {
          const auto words = random(batch.step() << 20 | static_cast<std::uint64_t>(u / 8),
                                    static_cast<std::uint64_t>(row));
          const std::int64_t first = std::max(u, config_.hidden_begin), last = std::min(u + 8, config_.hidden_end);
          for (std::int64_t unit = first; unit < last; ++unit) {
            const auto i = static_cast<std::size_t>(unit - u);
            const std::uint32_t draw = (words[i / 2] >> (16 * (i % 2))) & 0xFFFFu;
            d[unit - config_.hidden_begin] *= draw < threshold ? 0.0f : keep;
          }
        }
      }
      for (std::ptrdiff_t i = 0; i < ld_; ++i) h[i] *= d[i];
    }
  });
}

void InputLayer::backward(const Batch& batch, float* dh, float lr, std::uint64_t step) {
  if (ld_ == 0) return;
  constexpr std::size_t kAhead = 6;  // features whose rows are on their way from memory
  const Kernels& kern = kernels();
  const float step_size = state_.optimizer().step_size(lr, step);
  pool_.ranges(batch.size(), 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin * static_cast<std::size_t>(ld_); i < end * static_cast<std::size_t>(ld_); ++i)
      dh[i] *= derivative_[i];
  });
  const auto update_slot = [&](std::size_t slot, float* g) {
    const std::int64_t from = batch.feature_indptr()[slot];
    kern.weighted_sum(dh, ld_, batch.feature_points().data() + from, batch.feature_values().data() + from,
                      batch.feature_indptr()[slot + 1] - from, nullptr, g, ld_);
    const std::int64_t feature = batch.features()[slot];
    state_.update(feature, weights_.data() + feature * ld_, g, step_size);
  };
  pool_.run([&](int thread) {
    float* g = scratch_[static_cast<std::size_t>(thread)].data();
    if (state_.optimizer().dense()) {
      const auto [begin, end] =
          Pool::part(static_cast<std::size_t>(config_.features), 1, thread, pool_.threads());
      for (std::size_t f = begin; f < end; ++f) {
        const std::int32_t slot = batch.feature_slot(static_cast<std::int32_t>(f));
        if (slot >= 0) update_slot(static_cast<std::size_t>(slot), g);
        else state_.update(static_cast<std::int64_t>(f), weights_.data() + static_cast<std::ptrdiff_t>(f) * ld_,
                           nullptr, step_size);
      }
    } else {
      // Parts with equal numbers of entries, cut where a feature begins.
      const auto& indptr = batch.feature_indptr();
      const auto cut = [&](int t) {
        const std::int64_t entries = indptr.back() * t / pool_.threads();
        return static_cast<std::size_t>(std::lower_bound(indptr.begin(), indptr.end(), entries) - indptr.begin());
      };
      const std::size_t last = std::min(cut(thread + 1), batch.features().size());
      for (std::size_t slot = cut(thread); slot < last; ++slot) {
        if (slot + kAhead < last) {
          const std::int64_t next = batch.features()[slot + kAhead];
          for (std::ptrdiff_t i = 0; i < ld_; i += 16) __builtin_prefetch(weights_.data() + next * ld_ + i, 1);
          __builtin_prefetch(state_.accum().data() + next * state_.blocks(), 1);
        }
        update_slot(slot, g);
      }
    }
  });
  if (config_.bias) {
    float* g = scratch_[0].data();
    for (std::ptrdiff_t i = 0; i < ld_; ++i) g[i] = 0.0f;
    for (std::size_t p = 0; p < batch.size(); ++p) kern.axpy(1.0f, dh + static_cast<std::ptrdiff_t>(p) * ld_, g, ld_);
    bias_state_.update(0, bias_.data(), g, step_size);
  }
}

}  // namespace dslide
