// A layer's weights, in float32 or bfloat16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "buffer.hpp"
#include "kernels.hpp"
#include "optimizer.hpp"

namespace dslide {

// [rows, width]. In bfloat16 a row is updated in float32 and rounded stochastically (Rounding, optimizer.hpp).
class WeightTable {
 public:
  void reset(std::int64_t rows, std::int64_t width, bool half) {
    width_ = width;
    half_ = half;
    const auto size = static_cast<std::size_t>(rows * width);
    floats_.reset(half ? 0 : size);
    halves_.reset(half ? size : 0);
  }

  bool half() const { return half_; }
  std::int64_t width() const { return width_; }
  Buffer<float>& floats() { return floats_; }
  Buffer<std::uint16_t>& halves() { return halves_; }
  const Buffer<float>& floats() const { return floats_; }
  const float* row(std::int64_t row) const { return floats_.data() + row * width_; }
  const std::uint16_t* half_row(std::int64_t row) const { return halves_.data() + row * width_; }

  // A row in float32: where it is, or a copy in `scratch` [width].
  const float* as_floats(std::int64_t row, float* scratch) const {
    if (!half_) return this->row(row);
    kernels().expand(half_row(row), static_cast<std::ptrdiff_t>(width_), scratch);
    return scratch;
  }

  // Replaces a row, rounding to the nearest.
  void set(std::int64_t row, const float* values) {
    if (half_) kernels().round(values, static_cast<std::ptrdiff_t>(width_), halves_.data() + row * width_);
    else std::copy_n(values, width_, floats_.data() + row * width_);
  }

  // A row is about to be used; it is about to be prefetched.
  __attribute__((always_inline)) void prefetch(std::int64_t row) const { dslide::prefetch(place(row), row_bytes()); }
  __attribute__((always_inline)) void touch(std::int64_t row) const { dslide::touch(place(row), row_bytes()); }

  // What the optimiser needs to update a row.
  struct Step {
    Rounding rounding;
    std::uint64_t number;  // from 1
    float size;
    bool finished = false;  // by RowState::finish_step: the rows make it late
  };
  // By the gradient g [width]; null: zero.
  void update(RowState& state, const Step& step, std::int64_t row, const float* g) {
    if (half_) state.update(row, halves_.data() + row * width_, g, step.size, step.number, step.rounding, step.finished);
    else state.update(row, floats_.data() + row * width_, g, step.size, step.finished);
  }
  // By a gradient that is still to be summed up; `scratch` [width].
  void update(RowState& state, const Step& step, std::int64_t row, const WeightedSum& sum, float* scratch) {
    if (half_) state.update(row, halves_.data() + row * width_, sum, scratch, step.size, step.number, step.rounding);
    else state.update(row, floats_.data() + row * width_, sum, scratch, step.size);
  }

  // Adam with catch-up: the steps that a row, or every row, has missed.
  void catch_up(RowState& state, const Rounding& rounding, std::int64_t row) {
    if (half_) state.catch_up(row, halves_.data() + row * width_, rounding);
    else state.catch_up(row, floats_.data() + row * width_);
  }
  void settle(RowState& state, const Rounding& rounding, Pool& pool) {
    if (half_) state.settle(pool, halves_.data(), rounding);
    else state.settle(pool, floats_.data());
  }

 private:
  const void* place(std::int64_t row) const { return half_ ? static_cast<const void*>(half_row(row)) : this->row(row); }
  std::size_t row_bytes() const { return static_cast<std::size_t>(width_) * (half_ ? 2 : 4); }

  std::int64_t width_ = 0;
  bool half_ = false;
  Buffer<float> floats_;
  Buffer<std::uint16_t> halves_;
};

}  // namespace dslide
