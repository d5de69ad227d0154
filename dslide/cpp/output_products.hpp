// The three products of an output layer whose points share their active rows, in the precision of its weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "active_set.hpp"
#include "buffer.hpp"
#include "gemm.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace dslide {

// With weights in bfloat16 the activations and the logits' gradients are rounded to bfloat16 as well, to the nearest, and
// the sums are float32. Every method but those that take a pool is called by many threads at once.
class OutputProducts {
 public:
  void reset(std::int64_t hidden, bool half) {
    hidden_ = hidden;
    half_ = half;
  }

  // Takes the activations h [points, hidden] for `logits`.
  void pack_queries(Pool& pool, const float* h, std::ptrdiff_t points);
  std::ptrdiff_t padded_points() const;  // the width of a row of logits
  // out[i] = rows[i] · h^T for i < m <= kernels().mr; `ld` between rows of out.
  void logits(const WeightTable& weights, int m, const std::int32_t* rows, float* out, std::ptrdiff_t ld) const;

  // The gradient g [rows, ld] of the logits, whole pairs of rows at a time, for the other two products.
  void start_gradient(std::size_t rows, std::ptrdiff_t ld);
  void take_gradient(const float* g, std::size_t begin, std::size_t end, std::ptrdiff_t ld);

  // Takes the weights at positions [begin, end) of `active`, begin even.
  void pack_active(Pool& pool, const WeightTable& weights, const ActiveSet& active, std::size_t begin, std::size_t end);
  std::ptrdiff_t padded_hidden() const;  // the width of a row of hidden or weight gradients
  // out[i] += the sum over positions k in [k0, k1) of g[k][p + i] · weights[k], i < m.
  void hidden_gradient(const float* g, std::ptrdiff_t ld, std::size_t k0, std::size_t k1, int m, std::size_t p,
                       float* out) const;

  // Takes the activations again, for `weight_gradient`.
  void pack_points(Pool& pool, const float* h, std::ptrdiff_t points);
  // out[i] = g[r + i] · h, i < m.
  void weight_gradient(const float* g, std::ptrdiff_t ld, std::size_t r, int m, float* out) const;

 private:
  std::int64_t hidden_ = 0;
  bool half_ = false;
  std::ptrdiff_t points_ = 0;
  std::size_t first_ = 0;  // position of the first packed row
  PackedMatrix queries_, points_rows_, rows_;
  PackedPairs half_queries_, half_points_rows_, half_rows_;
  Buffer<std::uint16_t> half_h_;      // [points, hidden]
  Buffer<std::uint16_t> by_row_;      // the gradient, [rows, ld]
  Buffer<std::uint16_t> by_pair_;     // the same by pairs of rows, [rows / 2, ld, 2]
};

}  // namespace dslide
