// The three products of an output layer whose points share their active rows, in the precision of its weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "active_set.hpp"
#include "buffer.hpp"
#include "gemm.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace dslide {

// With weights in bfloat16 the activations and the logits' gradients are rounded to bfloat16 as well, to the nearest, and
// the sums are float32. What takes a pool is done by all threads; the other products are made a tile at a time by many
// threads at once, `thread` being the caller's.
class OutputProducts {
 public:
  static constexpr std::size_t kMostRows = 256;   // of a tile
  static constexpr std::size_t kUpdateRows = 32;  // whose weight gradients are best made together

  void reset(std::int64_t hidden, bool half, int threads) {
    hidden_ = hidden;
    half_ = half;
    const auto n = static_cast<std::size_t>(threads);
    rounded_.resize(n);
    rows_.resize(n);
    half_rows_.resize(n);
  }

  // Takes the activations of points [first, last) of h [points, hidden] for `logits`; `first` on a border of panels.
  void pack_queries(Pool& pool, const float* h, std::size_t points, std::size_t first, std::size_t last);
  // Between rows of all points' logits. Not a power of two, so that a column's values lie in different sets of the cache.
  std::ptrdiff_t logits_ld() const;
  // out[r - begin][p - p0] = the row at position r · h[p] for r in [begin, end), at most kMostRows, and p in [p0, p1), points
  // that were taken, p0 on a border of panels; whole panels are written; `ld` between rows of out.
  void logits(const WeightTable& weights, const ActiveSet& active, std::size_t begin, std::size_t end, std::size_t p0,
              std::size_t p1, float* out, std::ptrdiff_t ld, const Ahead* ahead = nullptr) const;

  std::ptrdiff_t padded_hidden() const;  // the width of a row of weight gradients
  // The logits' gradient [rows, ld], by position and point. Where weights are bfloat16 a pair of rows lies rounded in the
  // place of its first row once it was used: [points, 2].
  struct Gradient {
    float* values;
    std::ptrdiff_t ld;
    // Turns the numbers in the place of rows [r0, r1) and points [p0, p1) into the gradient.
    std::function<void(std::size_t r0, std::size_t r1, std::size_t p0, std::size_t p1)> make;

    float* row(std::size_t r) const { return values + static_cast<std::ptrdiff_t>(r) * ld; }
  };
  // out[p - first] = the sum over positions r of gradient[r][p] · weights[r] for points [first, last); out [.., hidden].
  void hidden_gradient(Pool& pool, const WeightTable& weights, const ActiveSet& active, std::size_t first, std::size_t last,
                       const Gradient& gradient, float* out);

  // Takes the activations of all points again, for `weight_gradient`.
  void pack_points(Pool& pool, const float* h, std::ptrdiff_t points);
  // out[r - r0] = gradient[r] · h for rows at positions [r0, r1), at most kMostRows, r0 even, after their hidden gradient;
  // `sums` [r1 - r0] is their sums over all points, unless it is null.
  void weight_gradient(std::size_t thread, const Gradient& gradient, std::size_t r0, std::size_t r1, float* out, float* sums,
                       const Ahead* ahead = nullptr);

 private:
  static constexpr int kRowParts = 4;

  void pack_active(std::size_t thread, const WeightTable& weights, const ActiveSet& active, std::size_t begin, std::size_t end);
  void add_hidden_gradient(std::size_t thread, const Gradient& gradient, std::size_t r0, std::size_t r1, std::size_t p0,
                           std::size_t p1, float* out, const Ahead& ahead) const;

  std::int64_t hidden_ = 0;
  bool half_ = false;
  std::ptrdiff_t points_ = 0;
  std::size_t first_ = 0;  // point of the packed queries
  PackedMatrix queries_, points_rows_;
  PackedPairs half_queries_, half_points_rows_;
  std::vector<PackedMatrix> rows_;      // by thread
  std::vector<PackedPairs> half_rows_;
  Buffer<std::uint16_t> half_h_;                // [points, hidden]
  std::vector<Buffer<std::uint16_t>> rounded_;  // by thread: rows of the gradient
  Buffer<float> sums_;                          // the hidden gradient of each part of the rows [kRowParts, points, padded]
};

}  // namespace dslide
