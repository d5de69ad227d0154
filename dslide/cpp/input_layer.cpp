#include "input_layer.hpp"

#include <algorithm>
#include <stdexcept>

#include "init.hpp"
#include "kernels.hpp"

namespace dslide {
namespace {

constexpr std::int64_t kAhead = 16;  // rows on their way from memory

}  // namespace

InputLayer::InputLayer(Pool& pool, const InputConfig& config)
    : pool_(pool), config_(config), ld_(static_cast<std::ptrdiff_t>(config.hidden_end - config.hidden_begin)) {
  if (config.features < 1 || config.hidden_begin < 0 || config.hidden_end < config.hidden_begin ||
      config.hidden_end > config.hidden_total)
    throw std::invalid_argument("input layer: impossible shape");
  if (config.state_block < 1 || config.hidden_begin % config.state_block != 0)
    throw std::invalid_argument("input layer: a shard must begin on a border of state blocks");
  if (config.dropout < 0.0f || config.dropout >= 1.0f)
    throw std::invalid_argument("input layer: dropout must lie in [0, 1)");
  weights_.reset(config.features, ld_, config.half);
  fill_normal(pool, Philox(config.seed, Purpose::kInputWeights), 0, config.features, config.hidden_begin,
              config.hidden_end, config.init_std, weights_);
  bias_.reset(config.bias ? static_cast<std::size_t>(ld_) : 0);
  if (config.bias)
    fill_normal(Philox(config.seed, Purpose::kInputBias), 0, 1, config.hidden_begin, config.hidden_end,
                config.init_std, bias_.data(), ld_);
  scratch_.resize(static_cast<std::size_t>(pool.threads()));
  for (auto& buffer : scratch_) buffer.reset(static_cast<std::size_t>(ld_) + 16);  // a gradient, or factors in eights
}

void InputLayer::set_optimizer(const Optimizer& optimizer) {
  state_.reset(optimizer, config_.features, ld_, ld_, config_.state_block, config_.half);
  bias_state_.reset(optimizer, config_.bias ? 1 : 0, ld_, ld_, config_.state_block);
}

void InputLayer::settle() {
  weights_.settle(state_, rounding(), pool_);
  bias_state_.settle(pool_, bias_.data());
}

void InputLayer::forward(const Batch& batch, float* out, bool train, std::size_t first, std::size_t last,
                         std::size_t lane) {
  if (ld_ == 0) return;
  const Kernels& kern = kernels();
  const float keep = 1.0f / (1.0f - config_.dropout);
  // Eight 16-bit draws a call; a unit is dropped where its draw lies below this.
  const auto threshold = static_cast<std::uint32_t>(config_.dropout * 65536.0f + 0.5f);
  const Philox random(config_.seed, Purpose::kDropout);
  if (train && first == 0 && state_.optimizer().catches_up()) {
    const Rounding draws = rounding();
    pool_.run([&](int thread) {
      for (const std::int64_t feature : batch.features(thread).ids) weights_.catch_up(state_, draws, feature);
    });
  }
  Buffer<float>& derivative = derivative_[lane];
  if (train) derivative.at_least(batch.size() * static_cast<std::size_t>(ld_));
  Buffer<float> predicted;  // several threads may ask for predictions at once
  float* second = (train ? second_ : predicted).at_least((last - first) * static_cast<std::size_t>(ld_));
  pool_.run([&](int thread) {
    const Batch::Features& mine = batch.features(thread);
    batch.for_shares(thread, first, last, [&](int share, std::size_t begin, std::size_t end) {
      const float* bias = config_.bias && share == 0 ? bias_.data() : nullptr;
      float* sums = share == 0 ? out + static_cast<std::ptrdiff_t>(first) * ld_ : second;
      for (std::size_t p = begin; p < end; ++p) {
        if (p + 1 < end) {  // the sum asks for rows as it goes, but for the first ones
          const Batch::Features::Row next = mine.row(share, p + 1);
          for (std::ptrdiff_t i = 0; i < std::min<std::ptrdiff_t>(kAhead, next.count); ++i) weights_.prefetch(next.ids[i]);
        }
        const Batch::Features::Row x = mine.row(share, p);
        float* h = sums + static_cast<std::ptrdiff_t>(p - first) * ld_;
        if (config_.half) kern.weighted_sum_half(weights_.half_row(0), ld_, x.ids, x.values, x.count, bias, h, ld_);
        else kern.weighted_sum(weights_.row(0), ld_, x.ids, x.values, x.count, bias, h, ld_);
      }
    });
  });
  const std::int64_t group = config_.hidden_begin / 8, groups = (config_.hidden_end + 7) / 8 - group;
  pool_.run([&](int thread) {
    float* factors = scratch_[static_cast<std::size_t>(thread)].data();
    const float* factor = train && threshold > 0 ? factors + (config_.hidden_begin - 8 * group) : nullptr;
    const auto [begin, end] = Pool::part(last - first, 1, thread, pool_.threads());
    for (std::size_t p = first + begin; p < first + end; ++p) {
      float* h = out + static_cast<std::ptrdiff_t>(p) * ld_;
      kern.axpy(1.0f, second + static_cast<std::ptrdiff_t>(p - first) * ld_, h, ld_);
      if (!train) {
        for (std::ptrdiff_t i = 0; i < ld_; ++i) h[i] = h[i] > 0.0f ? h[i] : config_.slope * h[i];
        continue;
      }
      if (factor != nullptr)
        kern.dropout(random.key(), batch.step() << 20 | static_cast<std::uint64_t>(group),
                     static_cast<std::uint64_t>(batch.row(p)), groups, threshold, keep, factors);
      kern.activate(h, factor, config_.slope, derivative.data() + static_cast<std::ptrdiff_t>(p) * ld_, ld_);
    }
  });
}

void InputLayer::backward(const Batch& batch, float* dh, float lr, std::uint64_t step, std::size_t first, std::size_t last,
                          std::size_t lane) {
  if (ld_ == 0) return;
  const bool ends = last == batch.size();
  const Kernels& kern = kernels();
  const Rounding draws = rounding();
  const WeightTable::Step now{draws, step, state_.optimizer().step_size(lr, step)};
  pool_.ranges(last - first, 1, [&](std::size_t begin, std::size_t end) {
    const auto at = static_cast<std::ptrdiff_t>(first + begin) * ld_;
    kern.multiply(dh + at, derivative_[lane].data() + at, static_cast<std::ptrdiff_t>(end - begin) * ld_);
  });
  pool_.run([&](int thread) {
    float* scratch = scratch_[static_cast<std::size_t>(thread)].data();
    const Batch::Features& mine = batch.features(thread);
    const auto update_slot = [&](std::size_t slot) {
      const std::int32_t from = mine.indptr[slot];
      const WeightedSum sum{dh, ld_, mine.points.data() + from, mine.values.data() + from, mine.indptr[slot + 1] - from};
      weights_.update(state_, now, mine.ids[slot], sum, scratch);
    };
    if (state_.optimizer().dense()) {
      if (!ends) return;
      const FeatureUnits units = batch.units_of(thread);
      for (std::int64_t f = 0; f < config_.features; ++f) {
        const auto feature = static_cast<std::int32_t>(f);
        if (!units.has(feature)) continue;
        const std::int32_t slot = batch.feature_slot(feature);
        if (slot >= 0) update_slot(static_cast<std::size_t>(slot));
        else weights_.update(state_, now, f, nullptr);
      }
      return;
    }
    const auto complete = [&](std::size_t slot) {  // by this part's points, and not before
      const auto point = static_cast<std::size_t>(mine.points[static_cast<std::size_t>(mine.indptr[slot + 1]) - 1]);
      return point >= first && point < last;
    };
    for (std::size_t slot = 0; slot < mine.ids.size(); ++slot) {
      const std::size_t ahead = slot + std::size_t{kAhead};
      if (ahead < mine.ids.size() && complete(ahead)) {
        state_.prefetch(mine.ids[ahead]);
        weights_.prefetch(mine.ids[ahead]);
      }
      if (complete(slot)) update_slot(slot);
    }
  });
  if (!ends) return;
  if (config_.bias) {
    float* g = scratch_[0].data();
    for (std::ptrdiff_t i = 0; i < ld_; ++i) g[i] = 0.0f;
    for (std::size_t p = 0; p < batch.size(); ++p) kern.axpy(1.0f, dh + static_cast<std::ptrdiff_t>(p) * ld_, g, ld_);
    bias_state_.update(0, bias_.data(), g, now.size);
  }
  state_.finish_step(now.size, step);
  bias_state_.finish_step(now.size, step);
}

}  // namespace dslide
