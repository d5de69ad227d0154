// Row-wise Adagrad and Adam, and the state that they keep for one matrix.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

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
};

// The optimiser's state of a [rows, width] matrix with row stride `ld`.
class RowState {
 public:
  void reset(const Optimizer& optimizer, std::int64_t rows, std::int64_t width, std::ptrdiff_t ld,
             std::int64_t block) {
    optimizer_ = optimizer;
    width_ = width;
    ld_ = ld;
    block_ = block;
    blocks_ = width == 0 ? 0 : (width + block - 1) / block;
    const auto n = static_cast<std::size_t>(rows);
    own_step_.reset(optimizer.catches_up() ? n : 0);
    if (optimizer.catches_up()) missed_.reset(optimizer.beta1, optimizer.beta2);
    if (optimizer.moments()) {
      accum_.reset(0);
      m_.reset(n * static_cast<std::size_t>(ld));
      v_.reset(n * static_cast<std::size_t>(ld));
    } else {
      m_.reset(0);
      v_.reset(0);
      accum_.reset(n * static_cast<std::size_t>(blocks_));
      for (std::size_t i = 0; i < accum_.size(); ++i) accum_[i] = optimizer.initial_accumulator;
    }
  }

  // Makes the steps that row `row` with weights w has missed. A row must be up to date whenever it is read.
  void catch_up(std::int64_t row, float* w) {
    std::uint32_t& own_step = own_step_[static_cast<std::size_t>(row)];
    if (own_step == missed_.now()) return;
    const MissedSteps::Since since = missed_.since(own_step);
    kernels().adam_missed(w, m_.data() + row * ld_, v_.data() + row * ld_, width_, since.terms, missed_.count(),
                          since.decay1, since.decay2, optimizer_.eps);
    own_step = missed_.now();
  }

  // Updates row `row` with weights w; g may be null for a zero gradient. finish_step() ends the step.
  void update(std::int64_t row, float* w, const float* g, float step_size) {
    const Kernels& kern = kernels();
    if (optimizer_.moments()) {
      if (optimizer_.catches_up()) catch_up(row, w);
      kern.adam(w, m_.data() + row * ld_, v_.data() + row * ld_, g, width_, step_size, optimizer_.beta1, optimizer_.beta2,
                optimizer_.eps);
      if (optimizer_.catches_up()) own_step_[static_cast<std::size_t>(row)] = missed_.now() + 1;
    } else if (g != nullptr) {
      kern.adagrad(w, accum_.data() + row * blocks_, g, width_, block_, step_size, optimizer_.eps);
    }
  }

  // The same with a gradient that is still to be summed up; `g` [width] is scratch.
  void update(std::int64_t row, float* w, const WeightedSum& sum, float* g, float step_size) {
    if (optimizer_.moments()) {
      kernels().weighted_sum(sum.rows, sum.ld, sum.ids, sum.values, sum.count, nullptr, g, width_);
      return update(row, w, g, step_size);
    }
    kernels().adagrad_sum(sum.rows, sum.ld, sum.ids, sum.values, sum.count, w, accum_.data() + row * blocks_, g, width_,
                          block_, step_size, optimizer_.eps);
  }

  // Asks for the state of a row that update() is about to want.
  __attribute__((always_inline)) void prefetch(std::int64_t row) const {
    if (!optimizer_.moments()) return dslide::prefetch(accum_.data() + row * blocks_, 4);
    dslide::prefetch(m_.data() + row * ld_, static_cast<std::size_t>(width_) * 4);
    dslide::prefetch(v_.data() + row * ld_, static_cast<std::size_t>(width_) * 4);
  }

  // The same before catch_up(), where there is something to catch up with.
  __attribute__((always_inline)) void prefetch_missed(std::int64_t row) const {
    if (own_step_[static_cast<std::size_t>(row)] != missed_.now()) prefetch(row);
  }

  // To be called once, after all rows that have a gradient were updated.
  void finish_step(float step_size) {
    if (optimizer_.catches_up()) missed_.advance(step_size);
  }

  // Brings all rows of `weights` [rows, ld] up to date.
  void settle(Pool& pool, float* weights) {
    if (!optimizer_.catches_up()) return;
    pool.ranges(own_step_.size(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t row = begin; row < end; ++row) {
        catch_up(static_cast<std::int64_t>(row), weights + static_cast<std::ptrdiff_t>(row) * ld_);
        own_step_[row] = 0;
      }
    });
    missed_.clear();
  }

  const Optimizer& optimizer() const { return optimizer_; }
  std::int64_t blocks() const { return blocks_; }
  Buffer<float>& accum() { return accum_; }
  Buffer<float>& m() { return m_; }
  Buffer<float>& v() { return v_; }

 private:
  Optimizer optimizer_;
  std::int64_t width_ = 0, block_ = 0, blocks_ = 0;
  std::ptrdiff_t ld_ = 0;
  Buffer<float> accum_, m_, v_;
  MissedSteps missed_;
  Buffer<std::uint32_t> own_step_;  // catch-up: of each row, in missed_'s count
};

}  // namespace dslide
