// Row-wise Adagrad and Adam, and the state that they keep for one matrix.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "buffer.hpp"
#include "kernels.hpp"

namespace dslide {

// Adagrad keeps one float a row and block of `block` units: state += mean(g^2), w -= lr g / (sqrt(state) + eps).
// Adam (Kingma & Ba 2015) keeps two floats a weight and moves every row at every step, rows without a gradient
// included, as the published SLIDE does: w -= lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + eps).
struct Optimizer {
  enum class Kind { kAdagrad, kAdam };
  Kind kind = Kind::kAdagrad;
  float eps = 1e-8f, beta1 = 0.9f, beta2 = 0.999f, initial_accumulator = 0.0f;

  bool dense() const { return kind == Kind::kAdam; }

  // The step size with Adam's bias correction; `step` counts from 1.
  float step_size(float lr, std::uint64_t step) const {
    if (kind == Kind::kAdagrad) return lr;
    const double t = static_cast<double>(step);
    return static_cast<float>(lr * std::sqrt(1.0 - std::pow(double{beta2}, t)) / (1.0 - std::pow(double{beta1}, t)));
  }
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
    if (optimizer.dense()) {
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

  // Updates row `row` with weights w; g may be null for a zero gradient.
  void update(std::int64_t row, float* w, const float* g, float step_size) {
    update_units(row, 0, width_, w, g, step_size);
  }

  // The same for `count` units from `begin`, a border of blocks: w and g point at the first of them.
  void update_units(std::int64_t row, std::int64_t begin, std::int64_t count, float* w, const float* g,
                    float step_size) {
    const Kernels& kern = kernels();
    if (optimizer_.dense()) {
      kern.adam(w, m_.data() + row * ld_ + begin, v_.data() + row * ld_ + begin, g, count, step_size, optimizer_.beta1,
                optimizer_.beta2, optimizer_.eps);
    } else if (g != nullptr) {
      kern.adagrad(w, accum_.data() + row * blocks_ + begin / block_, g, count, block_, step_size, optimizer_.eps);
    }
  }

  // Asks for the state of a row that is about to be updated.
  void prefetch(std::int64_t row) const {
    if (!optimizer_.dense()) __builtin_prefetch(accum_.data() + row * blocks_, 1);
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
};

}  // namespace dslide
