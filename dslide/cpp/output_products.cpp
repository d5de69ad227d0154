#include "output_products.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace dslide {
namespace {

constexpr std::ptrdiff_t kAhead = 8;  // rows to be packed that are on their way

float as_float(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// out [rows, width] = the sum of `parts` matrices [rows, ld], one behind the other at `sums`, in their order.
void sum_parts(Pool& pool, const float* sums, std::size_t parts, std::size_t rows, std::size_t width, std::size_t ld,
               float* out) {
  pool.ranges(rows, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t r = begin; r < end; ++r) {
      std::copy_n(sums + r * ld, width, out + r * width);
      for (std::size_t part = 1; part < parts; ++part)
        kernels().axpy(1.0f, sums + (part * rows + r) * ld, out + r * width, static_cast<std::ptrdiff_t>(width));
    }
  });
}

}  // namespace

void OutputProducts::pack_queries(Pool& pool, const float* h, std::size_t points, std::size_t first, std::size_t last) {
  points_ = static_cast<std::ptrdiff_t>(points);
  first_ = first;
  const auto hidden = static_cast<std::size_t>(hidden_);
  const auto n = static_cast<std::ptrdiff_t>(last - first);
  if (half_) half_queries_.resize(hidden_, n);
  else queries_.resize(hidden_, n);
  std::uint16_t* halves = half_ ? half_h_.at_least(points * hidden) + first * hidden : nullptr;
  pool.ranges(last - first, static_cast<std::size_t>(kernels().nr), [&](std::size_t b, std::size_t e) {
    const auto begin = static_cast<std::ptrdiff_t>(b), end = static_cast<std::ptrdiff_t>(e);
    if (!half_) {
      queries_.pack_transposed(begin, end, h + first * hidden, hidden_);
      return;
    }
    kernels().round(h + (first + b) * hidden, (end - begin) * hidden_, halves + b * hidden);
    half_queries_.pack_transposed(begin, end, halves, hidden_);
  });
}

std::ptrdiff_t OutputProducts::logits_ld() const { return whole_panels(points_) + 16; }

void OutputProducts::logits(const WeightTable& weights, const ActiveSet& active, std::size_t begin, std::size_t end,
                            std::size_t p0, std::size_t p1, float* out, std::ptrdiff_t ld, const Ahead* ahead) const {
  const std::size_t rows = end - begin;
  const auto m = static_cast<std::ptrdiff_t>(rows);
  const PackedMatrix::Part part{0, hidden_, static_cast<std::ptrdiff_t>(p0 - first_), static_cast<std::ptrdiff_t>(p1 - first_)};
  if (half_) {
    const std::uint16_t* a[kMostRows];
    for (std::size_t i = 0; i < rows; ++i) a[i] = weights.half_row(active.row(begin + i));
    half_queries_.multiply(m, a, 1, part, out, ld, false, ahead);
  } else {
    const float* a[kMostRows];
    for (std::size_t i = 0; i < rows; ++i) a[i] = weights.row(active.row(begin + i));
    queries_.multiply(m, a, 1, part, out, ld, false, ahead);
  }
}

std::ptrdiff_t OutputProducts::padded_hidden() const { return whole_panels(hidden_); }

// The rows are cut into kRowParts, whatever the number of threads, and a point's sum is that of its parts in their order: so
// a thread works on rows whose logits it has just made, packs them for itself, and waits for nobody. More threads than parts
// share the points of a part.
void OutputProducts::hidden_gradient(Pool& pool, const WeightTable& weights, const ActiveSet& active, std::size_t first,
                                     std::size_t last, const Gradient& gradient, float* out) {
  constexpr std::size_t kDepth = 256, kPoints = 128;  // rows and points of a tile, which stays in the cache
  constexpr std::size_t kLine = 16;                   // points whose values share a cache line
  const std::size_t points = last - first;
  const auto width = static_cast<std::size_t>(padded_hidden());
  const Pieces pieces(kRowParts, pool.threads());
  float* sums = sums_.at_least(kRowParts * points * width);
  pool.run([&](int t) {
    const auto thread = static_cast<std::size_t>(t);
    pieces.each(t, [&](int row_part, int piece) {
      const auto [begin, end] = Pool::part(active.row_count, 2 * kLine, row_part, kRowParts);
      const auto [b, e] = Pool::part(points, kLine, piece, pieces.of_part());
      float* part = sums + static_cast<std::size_t>(row_part) * points * width;
      std::fill(part + b * width, part + e * width, 0.0f);
      for (std::size_t r0 = begin; r0 < end; r0 += kDepth) {
        const std::size_t r1 = std::min(r0 + kDepth, end);
        pack_active(thread, weights, active, r0, r1);
        for (std::size_t p0 = first + b; p0 < first + e; p0 += kPoints) {
          const std::size_t p1 = std::min(p0 + kPoints, first + e);
          gradient.make(r0, r1, p0, p1);
          const bool across = p1 == first + e;  // where the next tile begins
          const std::size_t next_r = across ? r1 : r0, next_p = across ? first + b : p1;
          const std::size_t count = std::min(kDepth, end - next_r), wide = std::min(next_p + kPoints, first + e) - next_p;
          const Ahead ahead = [&](std::size_t tile, std::size_t tiles) {
            for (std::size_t r = next_r + count * tile / tiles; r < next_r + count * (tile + 1) / tiles; ++r) {
              prefetch(gradient.row(r) + next_p, 4 * wide);
              if (across) weights.prefetch(active.row(r));
            }
          };
          add_hidden_gradient(thread, gradient, r0, r1, p0, p1, part + (p0 - first) * width, ahead);
        }
      }
    });
  });
  sum_parts(pool, sums, kRowParts, points, static_cast<std::size_t>(hidden_), width, out);
}

// Rows at positions [begin, end), for the thread's next products.
void OutputProducts::pack_active(std::size_t thread, const WeightTable& weights, const ActiveSet& active, std::size_t begin,
                                 std::size_t end) {
  const auto count = static_cast<std::ptrdiff_t>(end - begin);
  const auto row = [&](std::ptrdiff_t k) {
    if (k + kAhead < count) weights.prefetch(active.row(begin + static_cast<std::size_t>(k + kAhead)));
    return active.row(begin + static_cast<std::size_t>(k));
  };
  if (half_) {
    half_rows_[thread].resize(count, hidden_);
    half_rows_[thread].pack_rows(0, count, [&](std::ptrdiff_t k) { return weights.half_row(row(k)); });
  } else {
    rows_[thread].resize(count, hidden_);
    rows_[thread].pack_rows(0, count, [&](std::ptrdiff_t k) { return weights.row(row(k)); });
  }
}

// out[p - p0] += the sum over rows r in [r0, r1), which the thread has packed, of gradient[r][p] · row r, p in [p0, p1).
void OutputProducts::add_hidden_gradient(std::size_t thread, const Gradient& gradient, std::size_t r0, std::size_t r1,
                                         std::size_t p0, std::size_t p1, float* out, const Ahead& ahead) const {
  const auto points = static_cast<std::ptrdiff_t>(p1 - p0);
  const PackedMatrix::Part part{0, static_cast<std::ptrdiff_t>(r1 - r0), 0, hidden_};
  if (!half_) {
    const float* a[kMostRows];
    for (std::size_t p = p0; p < p1; ++p) a[p - p0] = gradient.row(r0) + p;
    rows_[thread].multiply(points, a, gradient.ld, part, out, padded_hidden(), true, &ahead);
    return;
  }
  for (std::size_t r = r0; r < r1; r += 2)
    kernels().round_pairs(gradient.row(r) + p0, r + 1 < r1 ? gradient.row(r + 1) + p0 : nullptr, points,
                          gradient.row(r) + p0);
  const std::uint16_t* a[kMostRows];
  for (std::size_t p = p0; p < p1; ++p) a[p - p0] = reinterpret_cast<const std::uint16_t*>(gradient.row(r0) + p);
  half_rows_[thread].multiply(points, a, 2 * gradient.ld, part, out, padded_hidden(), true, &ahead);
}

void OutputProducts::pack_points(Pool& pool, const float* h, std::ptrdiff_t points) {
  if (half_) half_points_rows_.resize(points, hidden_);
  else points_rows_.resize(points, hidden_);
  pool.ranges(static_cast<std::size_t>(points), 16, [&](std::size_t b, std::size_t e) {
    const auto from = static_cast<std::ptrdiff_t>(b), to = static_cast<std::ptrdiff_t>(e);
    if (half_) half_points_rows_.pack_rows(from, to, [&](std::ptrdiff_t p) { return half_h_.data() + p * hidden_; });
    else points_rows_.pack_rows(from, to, [&](std::ptrdiff_t p) { return h + p * hidden_; });
  });
}

void OutputProducts::weight_gradient(std::size_t thread, const Gradient& gradient, std::size_t r0, std::size_t r1, float* out,
                                     float* sums, const Ahead* ahead) {
  const PackedMatrix::Part part{0, points_, 0, hidden_};
  const auto rows = static_cast<std::ptrdiff_t>(r1 - r0);
  if (!half_) {
    const float* a[kMostRows];
    for (std::size_t r = r0; r < r1; ++r) a[r - r0] = gradient.row(r);
    for (std::size_t r = 0; sums != nullptr && r < r1 - r0; ++r) sums[r] = std::accumulate(a[r], a[r] + points_, 0.0f);
    points_rows_.multiply(rows, a, 1, part, out, padded_hidden(), false, ahead);
    return;
  }
  std::uint16_t* halves = rounded_[thread].at_least((r1 - r0 + 1) * static_cast<std::size_t>(gradient.ld));
  const std::uint16_t* a[kMostRows];
  for (std::size_t r = r0; r < r1; r += 2) {
    std::uint16_t* row = halves + static_cast<std::ptrdiff_t>(r - r0) * gradient.ld;
    kernels().split_pairs(gradient.row(r), points_, row, row + gradient.ld);
    for (std::size_t i = r; i < std::min(r + 2, r1); ++i, row += gradient.ld) {
      if (points_ % 2 != 0) row[points_] = 0;
      a[i - r0] = row;
      if (sums == nullptr) continue;
      sums[i - r0] = 0.0f;
      for (std::ptrdiff_t p = 0; p < points_; ++p) sums[i - r0] += as_float(row[p]);
    }
  }
  half_points_rows_.multiply(rows, a, 1, part, out, padded_hidden(), false, ahead);
}

}  // namespace dslide
