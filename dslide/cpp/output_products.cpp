#include "output_products.hpp"

#include <algorithm>

namespace dslide {

void OutputProducts::pack_queries(Pool& pool, const float* h, std::ptrdiff_t points) {
  points_ = points;
  const auto nr = static_cast<std::size_t>(kernels().nr);
  if (!half_) queries_.resize(hidden_, points);
  if (half_) {
    half_queries_.resize(hidden_, points);
    half_h_.at_least(static_cast<std::size_t>(points * hidden_));
  }
  pool.ranges(static_cast<std::size_t>(points), nr, [&](std::size_t b, std::size_t e) {
    const auto begin = static_cast<std::ptrdiff_t>(b), end = static_cast<std::ptrdiff_t>(e);
    if (!half_) {
      queries_.pack_transposed(begin, end, h, hidden_);
      return;
    }
    kernels().round(h + begin * hidden_, (end - begin) * hidden_, half_h_.data() + begin * hidden_);
    half_queries_.pack_transposed(begin, end, half_h_.data(), hidden_);
  });
}

std::ptrdiff_t OutputProducts::padded_points() const { return whole_panels(points_); }

void OutputProducts::logits(const WeightTable& weights, int m, const std::int32_t* rows, float* out,
                            std::ptrdiff_t ld) const {
  if (half_) {
    const std::uint16_t* a[kMaxTile];
    for (int i = 0; i < m; ++i) a[i] = weights.half_row(rows[i]);
    half_queries_.multiply(m, a, 1, 0, hidden_, out, ld, false);
  } else {
    const float* a[kMaxTile];
    for (int i = 0; i < m; ++i) a[i] = weights.row(rows[i]);
    queries_.multiply(m, a, 1, 0, hidden_, out, ld, false);
  }
}

void OutputProducts::start_gradient(std::size_t rows, std::ptrdiff_t ld) {
  if (!half_) return;
  const std::size_t size = (rows + 1) / 2 * 2 * static_cast<std::size_t>(ld);
  by_row_.at_least(size);
  by_pair_.at_least(size);
}

void OutputProducts::take_gradient(const float* g, std::size_t begin, std::size_t end, std::ptrdiff_t ld) {
  if (!half_) return;
  const auto width = static_cast<std::size_t>(ld);
  for (std::size_t r = begin; r < end; ++r) {
    kernels().round(g + r * width, points_, by_row_.data() + r * width);
    if (points_ % 2 != 0) by_row_[r * width + static_cast<std::size_t>(points_)] = 0;
  }
  for (std::size_t r = begin; r < end; r += 2)
    kernels().interleave(by_row_.data() + r * width, r + 1 < end ? by_row_.data() + (r + 1) * width : nullptr, points_,
                         by_pair_.data() + r * width);
}

void OutputProducts::pack_active(Pool& pool, const WeightTable& weights, const ActiveSet& active, std::size_t begin,
                                 std::size_t end) {
  first_ = begin;
  const auto count = static_cast<std::ptrdiff_t>(end - begin);
  const auto position = [&](std::ptrdiff_t k) { return active.row(begin + static_cast<std::size_t>(k)); };
  if (half_) half_rows_.resize(count, hidden_);
  else rows_.resize(count, hidden_);
  pool.ranges(end - begin, 16, [&](std::size_t b, std::size_t e) {
    const auto from = static_cast<std::ptrdiff_t>(b), to = static_cast<std::ptrdiff_t>(e);
    if (half_) half_rows_.pack_rows(from, to, [&](std::ptrdiff_t k) { return weights.half_row(position(k)); });
    else rows_.pack_rows(from, to, [&](std::ptrdiff_t k) { return weights.row(position(k)); });
  });
}

std::ptrdiff_t OutputProducts::padded_hidden() const { return whole_panels(hidden_); }

void OutputProducts::hidden_gradient(const float* g, std::ptrdiff_t ld, std::size_t k0, std::size_t k1, int m,
                                     std::size_t p, float* out) const {
  const auto from = static_cast<std::ptrdiff_t>(k0 - first_), to = static_cast<std::ptrdiff_t>(k1 - first_);
  const auto row = static_cast<std::ptrdiff_t>(k0) * ld, point = static_cast<std::ptrdiff_t>(p);
  if (half_) {
    const std::uint16_t* a[kMaxTile];
    for (int i = 0; i < m; ++i) a[i] = by_pair_.data() + row + 2 * (point + i);
    half_rows_.multiply(m, a, ld, from, to, out, padded_hidden(), true);
  } else {
    const float* a[kMaxTile];
    for (int i = 0; i < m; ++i) a[i] = g + row + point + i;
    rows_.multiply(m, a, ld, from, to, out, padded_hidden(), true);
  }
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

void OutputProducts::weight_gradient(const float* g, std::ptrdiff_t ld, std::size_t r, int m, float* out) const {
  const auto row = static_cast<std::ptrdiff_t>(r);
  if (half_) {
    const std::uint16_t* a[kMaxTile];
    for (int i = 0; i < m; ++i) a[i] = by_row_.data() + (row + i) * ld;
    half_points_rows_.multiply(m, a, 1, 0, points_, out, padded_hidden(), false);
  } else {
    const float* a[kMaxTile];
    for (int i = 0; i < m; ++i) a[i] = g + (row + i) * ld;
    points_rows_.multiply(m, a, 1, 0, points_, out, padded_hidden(), false);
  }
}

}  // namespace dslide
