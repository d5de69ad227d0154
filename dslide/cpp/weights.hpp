// A layer's weights, in float32 or bfloat16.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "buffer.hpp"
#include "kernels.hpp"
#include "optimizer.hpp"
#include "philox.hpp"

namespace dslide {

// [rows, width]. In bfloat16 a row is updated in float32 and rounded stochastically: up with the probability of the part
// that is cut off, so that steps below half a unit in the last place are not lost but taken now and then (Gupta et al.
// 2015, Deep learning with limited numerical precision, section 3). The draws are keyed by (seed, step, row, unit), so
// they are the same for any number of threads and ranks.
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

  // Units [begin, end) of a row are about to be used.
  __attribute__((always_inline)) void prefetch(std::int64_t row, std::int64_t begin, std::int64_t end) const {
    const auto units = static_cast<std::size_t>(end - begin);
    if (half_) dslide::prefetch(half_row(row) + begin, 2 * units);
    else dslide::prefetch(this->row(row) + begin, 4 * units);
  }

  // What the optimiser needs to update `count` units from `begin` of a row by the gradient g (of those units).
  struct Step {
    const Philox& random;         // of this table's rounding
    std::uint64_t number;         // from 1
    float size;
    std::int64_t first_row, first_unit;  // global ids of this shard's row 0 and unit 0
  };
  // `scratch` holds `count` floats, needed in bfloat16.
  void update(RowState& state, const Step& step, std::int64_t row, std::int64_t begin, std::int64_t count, const float* g,
              float* scratch) {
    if (!half_) {
      state.update_units(row, begin, count, floats_.data() + row * width_ + begin, g, step.size);
      return;
    }
    std::uint16_t* at = halves_.data() + row * width_ + begin;
    kernels().expand(at, static_cast<std::ptrdiff_t>(count), scratch);
    state.update_units(row, begin, count, scratch, g, step.size);
    const auto words = step.random(step.number, static_cast<std::uint64_t>(step.first_row + row));
    kernels().round_stochastic(scratch, static_cast<std::ptrdiff_t>(count), words[0],
                               static_cast<std::uint32_t>(step.first_unit + begin), at);
  }

 private:
  std::int64_t width_ = 0;
  bool half_ = false;
  Buffer<float> floats_;
  Buffer<std::uint16_t> halves_;
};

}  // namespace dslide
