// The vector kernels of one instruction set, and which one is in use.
//
// The files kernels_<isa>.cpp compile the same source (kernels.inc) with other flags. They include nothing
// from the standard library that could leave an inline function compiled for the wrong CPU behind.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "feature_units.hpp"

namespace dslide {

// A step of Adam: m = keep1 m + (1 - beta1) g, v = keep2 v + (1 - beta2) g^2, w -= lr m / (sqrt(v) + eps). keep1 and keep2
// are beta1 and beta2, or less where steps without a gradient come before.
struct AdamStep {
  float lr, eps, beta1, beta2, keep1, keep2;
};

struct Kernels {
  const char* name;
  int mr, nr;  // tiles of the matrix products: rows and columns

  // c[i][0..nr) = (accumulate ? c : 0) + sum_k a[i][k * a_step] * b[k * nr + j] for i < mr; k in ascending order.
  void (*tile)(int mr, std::ptrdiff_t k, const float* const* a, std::ptrdiff_t a_step, const float* b, float* c,
               std::ptrdiff_t ldc, bool accumulate);
  // panel[i * nr + r] = x[r * ld + i] for i < k, r < rows <= nr; zeros for the other r < nr. Units are of 4 bytes: floats,
  // or pairs of bfloat16.
  void (*pack_panel)(const void* x, std::ptrdiff_t ld, std::ptrdiff_t rows, std::ptrdiff_t k, void* panel);
  // out[0..n) = bias (or 0) + sum_j values[j] * rows[ids[j] * ld + 0..n), j ascending.
  void (*weighted_sum)(const float* rows, std::ptrdiff_t ld, const std::int32_t* ids, const float* values,
                       std::ptrdiff_t count, const float* bias, float* out, std::ptrdiff_t n);
  // The same from rows in bfloat16.
  void (*weighted_sum_half)(const std::uint16_t* rows, std::ptrdiff_t ld, const std::int32_t* ids, const float* values,
                            std::ptrdiff_t count, const float* bias, float* out, std::ptrdiff_t n);
  // The tile with both sides in bfloat16, by pairs along the sum: a[i] steps by `a_step` pairs and b holds pairs
  // [k][nr][2], k counts pairs. Sums are in float32; on CPUs with the instruction (AVX-512 BF16) it does two
  // multiplications at a time, and its order within a pair is its own.
  void (*tile_pairs)(int mr, std::ptrdiff_t k, const std::uint16_t* const* a, std::ptrdiff_t a_step,
                     const std::uint16_t* b, float* c, std::ptrdiff_t ldc, bool accumulate);
  // bfloat16 -> float32.
  void (*expand)(const std::uint16_t* x, std::ptrdiff_t n, float* out);
  // float32 -> bfloat16, to the nearest, ties to even.
  void (*round)(const float* x, std::ptrdiff_t n, std::uint16_t* out);
  // Pair j of `out` is x[j], y[j] (0 if y is null), rounded like that; out may be x or y. And the way back.
  void (*round_pairs)(const float* x, const float* y, std::ptrdiff_t n, void* out);
  void (*split_pairs)(const void* pairs, std::ptrdiff_t n, std::uint16_t* first, std::uint16_t* second);
  // float32 -> bfloat16, up with the probability of the part that is cut off; value j's draw is a function of `key`,
  // `first` + j and which of its three draws, 0, 1 or 2, is taken.
  void (*round_stochastic)(const float* x, std::ptrdiff_t n, std::uint32_t key, std::uint32_t first, int which,
                           std::uint16_t* out);
  // out[2 j] = x[j], out[2 j + 1] = y[j] (0 if y is null).
  void (*interleave)(const std::uint16_t* x, const std::uint16_t* y, std::ptrdiff_t n, std::uint16_t* out);
  // out[j] = <w, rows[ids[j] * ld]> over n.
  void (*dots)(const float* w, const float* rows, std::ptrdiff_t ld, const std::int32_t* ids, std::ptrdiff_t count,
               float* out, std::ptrdiff_t n);
  // rows[ids[j] * ld + 0..n) += values[j] * w.
  void (*scatter_add)(const float* w, float* rows, std::ptrdiff_t ld, const std::int32_t* ids, const float* values,
                      std::ptrdiff_t count, std::ptrdiff_t n);
  // y += a * x.
  void (*axpy)(float a, const float* x, float* y, std::ptrdiff_t n);
  // Over columns of x [rows, ld], z[i][j] = x[i][j] + shift[i]: max[j] = max_i z[i][j], x[i][j] = exp(z[i][j] - max[j])
  // and sum[j], their sum (0 and -inf without a finite value).
  void (*column_exp_sum)(float* x, std::ptrdiff_t rows, std::ptrdiff_t ld, std::ptrdiff_t n, const float* shift,
                         float* max, float* sum);
  // Returns max_j x[j] (-inf when empty). Unless they are null, brings `max` and `sum`, which describe numbers y by their
  // maximum and sum_j exp(y[j] - max) (-inf and 0: none), to those of y and x together.
  float (*log_sum_update)(const float* x, std::ptrdiff_t n, float* max, float* sum);
  // lse[j] = log-sum-exp of `parts` partial results (max, sum), each [parts, ld], in ascending order.
  void (*combine_log_sum)(const float* max, const float* sum, std::ptrdiff_t parts, std::ptrdiff_t ld,
                          std::ptrdiff_t n, float* lse);
  // x[j] *= y[j].
  void (*multiply)(float* x, const float* y, std::ptrdiff_t n);
  // derivative[j] = (h[j] > 0 ? 1 : slope) * factor[j] (1 if factor is null); h[j] *= derivative[j].
  void (*activate)(float* h, const float* factor, float slope, float* derivative, std::ptrdiff_t n);
  // factor[8 g + i] = 0 where draw i (16 bits) of Philox counter (a + g, b) under `key` is below `threshold`, else `keep`;
  // g < groups.
  void (*dropout)(const std::uint32_t key[2], std::uint64_t a, std::uint64_t b, std::ptrdiff_t groups,
                  std::uint32_t threshold, float keep, float* factor);
  // out[i] = exp(x[i] - shift[ids[i]]); out may be x.
  void (*exp_pairs)(const float* x, const std::int32_t* ids, std::ptrdiff_t n, const float* shift, float* out);
  // Of rows side by side, x [dim, nr]: best[b * nr + r] = place of the largest of the 8 coordinates bins[8 b ..] of row r,
  // the first of equals, or -1 if all are -inf, which zeros become first unless `zeros`. Returns whether there is any -1.
  bool (*winners)(float* x, std::ptrdiff_t dim, bool zeros, const std::int32_t* bins, std::ptrdiff_t count,
                  std::int32_t* best);
  // From these places, none of them negative, k a table: codes[t * stride + r] = ((best[t k] << shift) + best[t k + 1]) << ...
  // of row r < rows <= nr.
  void (*join_codes)(const std::int32_t* best, std::ptrdiff_t tables, int k, int shift, std::ptrdiff_t rows,
                     std::uint32_t* codes, std::ptrdiff_t stride);
  // x[j] = exp(x[j] - shift[j]) * scale[j].
  void (*softmax_gradient)(float* x, const float* shift, const float* scale, std::ptrdiff_t n);
  // Row-wise Adagrad on blocks: state[b] += mean(g^2); w -= lr * g / (sqrt(state[b]) + eps).
  void (*adagrad)(float* w, float* state, const float* g, std::ptrdiff_t n, std::ptrdiff_t block, float lr, float eps);
  // The same with g = sum_j values[j] * rows[ids[j] * ld + 0..n), j ascending: weighted_sum and adagrad in one, bit by bit.
  // `g` [n] is scratch.
  void (*adagrad_sum)(const float* rows, std::ptrdiff_t ld, const std::int32_t* ids, const float* values,
                      std::ptrdiff_t count, float* w, float* state, float* g, std::ptrdiff_t n, std::ptrdiff_t block,
                      float lr, float eps);
  // Both with w in bfloat16: computed in float32 and rounded once, as round_stochastic does with its draws 0.
  void (*adagrad_half)(std::uint16_t* w, float* state, const float* g, std::ptrdiff_t n, std::ptrdiff_t block, float lr,
                       float eps, std::uint32_t key, std::uint32_t first);
  void (*adagrad_sum_half)(const float* rows, std::ptrdiff_t ld, const std::int32_t* ids, const float* values,
                           std::ptrdiff_t count, std::uint16_t* w, float* state, float* g, std::ptrdiff_t n,
                           std::ptrdiff_t block, float lr, float eps, std::uint32_t key, std::uint32_t first);
  // g may be null (a zero gradient).
  void (*adam)(float* w, float* m, float* v, const float* g, std::ptrdiff_t n, const AdamStep& step);
  // Adam's steps without a gradient, all at once (missed_steps.hpp): d = 1 / (sqrt(v) + eps), u = sqrt(v) d,
  // w -= m d (terms[0] + u terms[1] + ...), then m *= decay[0], v *= decay[1], unless decay is null.
  void (*adam_missed)(float* w, float* m, float* v, std::ptrdiff_t n, const float* terms, int count, const float* decay,
                      float eps);
  // Both with w, m and v in bfloat16: computed in float32 and rounded once, as round_stochastic does with its draws 0 for w,
  // 1 for m and 2 for v.
  void (*adam_half)(std::uint16_t* w, std::uint16_t* m, std::uint16_t* v, const float* g, std::ptrdiff_t n,
                    const AdamStep& step, std::uint32_t key, std::uint32_t first);
  void (*adam_missed_half)(std::uint16_t* w, std::uint16_t* m, std::uint16_t* v, std::ptrdiff_t n, const float* terms,
                           int count, const float* decay, float eps, std::uint32_t key, std::uint32_t first);
  // Standard normal numbers times `std`, four a counter: out[(r * columns + c) * 4 ..] has those of Philox counter
  // (a + r, b + c) under `key`, by Box-Muller.
  void (*normals)(const std::uint32_t key[2], std::uint64_t a, std::uint64_t b, std::ptrdiff_t rows,
                  std::ptrdiff_t columns, float std, float* out);
  // int8 with one scale a row (absmax / 127).
  float (*quantise)(const float* x, std::ptrdiff_t n, std::int8_t* out);
  void (*dequantise)(const std::int8_t* x, float scale, std::ptrdiff_t n, float* out, bool add);
  // Copies those of n features that are of the units `which`, and their values, in order; returns how many. What lies up to
  // kTakenSlack places behind them is overwritten.
  static constexpr std::ptrdiff_t kTakenSlack = 16;
  std::ptrdiff_t (*take_features)(const std::int32_t* ids, const float* values, std::ptrdiff_t n, const FeatureUnits& which,
                                  std::int32_t* to_ids, float* to_values);
};

// The instruction sets that this build and this CPU have, best first.
std::vector<const Kernels*> supported_kernels();

// The kernels in use: DSLIDE_ISA from the environment, else the best. Throws if DSLIDE_ISA names none that is supported.
const Kernels& kernels();

}  // namespace dslide
