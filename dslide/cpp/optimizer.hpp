// Row-wise Adagrad and Adam, and the state that they keep for one matrix.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "buffer.hpp"
#include "kernels.hpp"
#include "missed_steps.hpp"
#include "pool.hpp"

namespace dslide {

// Adagrad keeps one float a row and block of `block` units: state += mean(g^2), w -= lr g / (sqrt(state) + eps).
// Adam (Kingma & Ba 2015) keeps two floats a weight and moves every row at every step, rows without a gradient
// included, as the published SLIDE does: w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).
// Adam with catch-up is the same, but leaves a row without a gradient alone until it is next read (missed_steps.hpp).
struct Optimizer {
  enum class Kind { kAdagrad, kAdam, kAdamCatchUp };
  Kind kind = Kind::kAdagrad;
  float eps = 1e-8f, beta1 = 0.9f, beta2 = 0.999f, initial_accumulator = 0.0f;

  bool moments() const { return kind != Kind::kAdagrad; }    // keeps m and v
  bool dense() const { return kind == Kind::kAdam; }           // moves every row at every step
  bool catches_up() const { return kind == Kind::kAdamCatchUp; }

  // The step size with Adam's bias correction; `step` counts from 1.
  float step_size(float lr, std::uint64_t step) const {
    if (kind == Kind::kAdagrad) return lr;
    const double t = static_cast<double>(step);
    return static_cast<float>(lr * std::sqrt(1.0 - std::pow(double{beta2}, t)) / (1.0 - std::pow(double{beta1}, t)));
  }
};

// sum_j values[j] * rows[ids[j]], j < count: rows of a matrix with row stride `ld`.
struct WeightedSum {
  const float* rows;
  std::ptrdiff_t ld;
  const std::int32_t* ids;
  const float* values;
  std::ptrdiff_t count;

  void make(float* out, std::ptrdiff_t width) const {
    kernels().weighted_sum(rows, ld, ids, values, count, nullptr, out, width);
  }
};

// What a matrix in bfloat16 is rounded by: up with the probability of the part that is cut off, so that steps below half a
// unit in the last place are not lost but taken now and then (Gupta et al. 2015, Deep learning with limited numerical
// precision, section 3). The draws are keyed by (seed, step, row, unit), so they are the same for any number of threads
// and ranks.
struct Rounding {
  std::uint64_t seed;
  std::int64_t first_row, first_unit;  // global ids of this shard's row 0 and unit 0

  // The key of a row's draws in the step of this number. A Philox number would cost as much as the rounding of half a row.
  std::uint32_t key(std::uint64_t step, std::int64_t row) const {
    const std::uint64_t base = mixed(seed + step * 0x9E3779B97F4A7C15u);
    return static_cast<std::uint32_t>(mixed(base + static_cast<std::uint64_t>(first_row + row) * 0x9E3779B97F4A7C15u) >> 32);
  }
  // The same for the steps that it missed up to the one of this number.
  std::uint32_t missed_key(std::uint64_t step, std::int64_t row) const {
    return key(step | std::uint64_t{1} << 63, row);
  }
  std::uint32_t unit() const { return static_cast<std::uint32_t>(first_unit); }

  // SplitMix64's finaliser (Steele et al. 2014, Fast splittable pseudorandom number generators).
  static std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
  }
};

// The optimiser's state of a [rows, width] matrix with row stride `ld`. Of a matrix in bfloat16 Adam's moments are
// bfloat16, too, and rounded as the weights are: with b2 = 0.999 a step changes v by less than half a unit in the last
// place, and rounding to the nearest would hold it where it is.
class RowState {
 public:
  void reset(const Optimizer& optimizer, std::int64_t rows, std::int64_t width, std::ptrdiff_t ld,
             std::int64_t block, bool half = false) {
    optimizer_ = optimizer;
    width_ = width;
    ld_ = ld;
    block_ = block;
    blocks_ = width == 0 ? 0 : (width + block - 1) / block;
    half_ = half && optimizer.moments();
    const auto n = static_cast<std::size_t>(rows), size = optimizer.moments() ? n * static_cast<std::size_t>(ld) : 0;
    own_step_.reset(optimizer.catches_up() ? n : 0);
    if (optimizer.catches_up()) missed_.reset(optimizer.beta1, optimizer.beta2);
    m_.reset(half_ ? 0 : size);
    v_.reset(half_ ? 0 : size);
    half_m_.reset(half_ ? size : 0);
    half_v_.reset(half_ ? size : 0);
    accum_.reset(optimizer.moments() ? 0 : n * static_cast<std::size_t>(blocks_));
    for (std::size_t i = 0; i < accum_.size(); ++i) accum_[i] = optimizer.initial_accumulator;
  }

  // Takes weights w of row `row` where the steps that it has missed lead: to be done before they are read. Its moments follow
  // in the row's update, which has to come in the same step, or when all rows settle; so they are written once.
  void catch_up(std::int64_t row, float* w) {
    if (!misses_weights(row)) return;
    const MissedSteps::Since since = missed(row);
    kernels().adam_missed(w, m_.data() + row * ld_, v_.data() + row * ld_, width_, since.terms, missed_.count(), nullptr,
                          optimizer_.eps);
    own_step_[static_cast<std::size_t>(row)] |= kWeightsThere;
  }
  void catch_up(std::int64_t row, std::uint16_t* w, const Rounding& rounding) {
    if (!misses_weights(row)) return;
    const MissedSteps::Since since = missed(row);
    kernels().adam_missed_half(w, half_m_.data() + row * ld_, half_v_.data() + row * ld_, width_, since.terms,
                               missed_.count(), nullptr, optimizer_.eps, rounding.missed_key(step_, row),
                               rounding.unit());
    own_step_[static_cast<std::size_t>(row)] |= kWeightsThere;
  }

  // Updates row `row` with weights w; g may be null for a zero gradient. finish_step() ends the step; a row whose weights have
  // caught up may make it after that, if `finished` says so.
  void update(std::int64_t row, float* w, const float* g, float step_size, bool finished = false) {
    const Kernels& kern = kernels();
    if (optimizer_.moments()) {
      if (optimizer_.catches_up() && !finished) catch_up(row, w);
      kern.adam(w, m_.data() + row * ld_, v_.data() + row * ld_, g, width_, adam_step(row, step_size, finished));
      made(row, finished);
    } else if (g != nullptr) {
      kern.adagrad(w, accum_.data() + row * blocks_, g, width_, block_, step_size, optimizer_.eps);
    }
  }

  // The same with a gradient that is still to be summed up; `g` [width] is scratch.
  void update(std::int64_t row, float* w, const WeightedSum& sum, float* g, float step_size) {
    if (optimizer_.moments()) {
      sum.make(g, width_);
      return update(row, w, g, step_size);
    }
    kernels().adagrad_sum(sum.rows, sum.ld, sum.ids, sum.values, sum.count, w, accum_.data() + row * blocks_, g, width_,
                          block_, step_size, optimizer_.eps);
  }

  // Both of a row in bfloat16, in the step of this number.
  void update(std::int64_t row, std::uint16_t* w, const float* g, float step_size, std::uint64_t step,
              const Rounding& rounding, bool finished = false) {
    const Kernels& kern = kernels();
    if (optimizer_.moments()) {
      if (optimizer_.catches_up() && !finished) catch_up(row, w, rounding);
      kern.adam_half(w, half_m_.data() + row * ld_, half_v_.data() + row * ld_, g, width_,
                     adam_step(row, step_size, finished), rounding.key(step, row), rounding.unit());
      made(row, finished);
    } else if (g != nullptr) {
      kern.adagrad_half(w, accum_.data() + row * blocks_, g, width_, block_, step_size, optimizer_.eps,
                        rounding.key(step, row), rounding.unit());
    }
  }
  void update(std::int64_t row, std::uint16_t* w, const WeightedSum& sum, float* g, float step_size, std::uint64_t step,
              const Rounding& rounding) {
    if (optimizer_.moments()) {
      sum.make(g, width_);
      return update(row, w, g, step_size, step, rounding);
    }
    kernels().adagrad_sum_half(sum.rows, sum.ld, sum.ids, sum.values, sum.count, w, accum_.data() + row * blocks_, g, width_,
                               block_, step_size, optimizer_.eps, rounding.key(step, row), rounding.unit());
  }

  // Asks for the state of a row that update() is about to want.
  __attribute__((always_inline)) void prefetch(std::int64_t row) const {
    const auto units = static_cast<std::size_t>(width_);
    if (half_) {
      dslide::prefetch(half_m_.data() + row * ld_, 2 * units);
      dslide::prefetch(half_v_.data() + row * ld_, 2 * units);
    } else if (optimizer_.moments()) {
      dslide::prefetch(m_.data() + row * ld_, 4 * units);
      dslide::prefetch(v_.data() + row * ld_, 4 * units);
    } else {
      dslide::prefetch(accum_.data() + row * blocks_, 4);
    }
  }

  // The same before catch_up(), where there is something to catch up with.
  __attribute__((always_inline)) void prefetch_missed(std::int64_t row) const {
    if (misses_weights(row)) prefetch(row);
  }

  // Asks for the number of a row's own step, which prefetch_missed() is about to want.
  __attribute__((always_inline)) void prefetch_step(std::int64_t row) const {
    if (optimizer_.catches_up()) __builtin_prefetch(own_step_.data() + row);
  }

  // To be called once, after all rows that have a gradient were updated in the step of this number.
  void finish_step(float step_size, std::uint64_t step) {
    step_ = step;
    if (optimizer_.catches_up()) missed_.advance(step_size);
  }

  // Brings all rows of `weights` [rows, ld] up to date, and their moments.
  void settle(Pool& pool, float* weights) {
    settle_rows(pool, [&](std::int64_t row, const MissedSteps::Since& since) {
      kernels().adam_missed(weights + row * ld_, m_.data() + row * ld_, v_.data() + row * ld_, width_, since.terms,
                            missed_.count(), since.decay, optimizer_.eps);
    });
  }
  void settle(Pool& pool, std::uint16_t* weights, const Rounding& rounding) {
    settle_rows(pool, [&](std::int64_t row, const MissedSteps::Since& since) {
      kernels().adam_missed_half(weights + row * ld_, half_m_.data() + row * ld_, half_v_.data() + row * ld_, width_,
                                 since.terms, missed_.count(), since.decay, optimizer_.eps,
                                 rounding.missed_key(step_, row), rounding.unit());
    });
  }

  const Optimizer& optimizer() const { return optimizer_; }
  std::int64_t blocks() const { return blocks_; }
  bool half() const { return half_; }  // moments in bfloat16
  Buffer<float>& accum() { return accum_; }
  Buffer<float>& m() { return m_; }
  Buffer<float>& v() { return v_; }
  Buffer<std::uint16_t>& half_m() { return half_m_; }
  Buffer<std::uint16_t>& half_v() { return half_v_; }

 private:
  static constexpr std::uint32_t kWeightsThere = std::uint32_t{1} << 31;

  std::uint32_t own_step(std::int64_t row) const { return own_step_[static_cast<std::size_t>(row)] & ~kWeightsThere; }
  bool weights_there(std::int64_t row) const { return (own_step_[static_cast<std::size_t>(row)] & kWeightsThere) != 0; }
  bool misses_weights(std::int64_t row) const { return !weights_there(row) && own_step(row) != missed_.now(); }
  MissedSteps::Since missed(std::int64_t row) const { return missed_.since(own_step(row), weights_there(row)); }
  // The steps that were finished before the one that rows make now.
  std::uint32_t before(bool finished) const { return missed_.now() - (finished ? 1 : 0); }

  // A row's own step, which begins with what is left of its moments after the steps that it missed.
  AdamStep adam_step(std::int64_t row, float step_size, bool finished) const {
    const float beta1 = optimizer_.beta1, beta2 = optimizer_.beta2;
    AdamStep step{step_size, optimizer_.eps, beta1, beta2, beta1, beta2};
    if (optimizer_.catches_up()) {
      const float* decay = missed_.decay(before(finished) - own_step(row));
      step.keep1 *= decay[0];
      step.keep2 *= decay[1];
    }
    return step;
  }
  void made(std::int64_t row, bool finished) {
    if (optimizer_.catches_up()) own_step_[static_cast<std::size_t>(row)] = before(finished) + 1;
  }
  template <class Settle>
  void settle_rows(Pool& pool, Settle settle_row) {
    if (!optimizer_.catches_up()) return;
    pool.ranges(own_step_.size(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        const auto row = static_cast<std::int64_t>(i);
        if (own_step(row) != missed_.now()) settle_row(row, missed(row));
        own_step_[i] = 0;
      }
    });
    missed_.clear();
  }

  Optimizer optimizer_;
  std::int64_t width_ = 0, block_ = 0, blocks_ = 0;
  std::ptrdiff_t ld_ = 0;
  bool half_ = false;
  std::uint64_t step_ = 0;  // that was finished last
  Buffer<float> accum_, m_, v_;
  Buffer<std::uint16_t> half_m_, half_v_;
  MissedSteps missed_;
  Buffer<std::uint32_t> own_step_;  // catch-up: of each row, in missed_'s count, and whether kWeightsThere
};

}  // namespace dslide
