// The output layer where every point sees every active row (in-batch, uniform, full): dense products over the active
// rows, which are read where they lie. Logits are kept by row: [active rows, points].
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr std::size_t kMostTileRows = 256;

}  // namespace

std::size_t OutputLayer::tile_rows() const { return active_.row_count > 16384 ? kMostTileRows : 32; }

void OutputLayer::forward_shared(const float* h, std::size_t points, float* lse) {
  const Kernels& kern = kernels();
  const auto n = static_cast<std::ptrdiff_t>(points);
  products_.pack_queries(pool_, h, n);
  // Not a power of two, so that a column's values lie in different sets of the cache.
  ld_ = products_.padded_points() + 16;
  const auto ld = static_cast<std::size_t>(ld_);
  const std::size_t rows = active_.row_count, tile = tile_rows(), tiles = (rows + tile - 1) / tile;
  logits_.at_least(rows * ld);
  part_max_.at_least(std::max<std::size_t>(1, tiles) * ld);
  part_sum_.at_least(std::max<std::size_t>(1, tiles) * ld);
  own_logits_.resize(active_.own.size());
  pool_.ranges(rows, tile, [&](std::size_t first, std::size_t last) {
    float shift[kMostTileRows];
    for (std::size_t t0 = first; t0 < last; t0 += tile) {
      const std::size_t t1 = std::min(t0 + tile, last);
      for (std::size_t r = t0; r < t1; r += static_cast<std::size_t>(kern.mr)) {
        const int m = static_cast<int>(std::min(t1 - r, static_cast<std::size_t>(kern.mr)));
        std::int32_t group[kMaxTile];
        for (int i = 0; i < m; ++i) group[i] = active_.row(r + static_cast<std::size_t>(i));
        prefetch_rows(r + static_cast<std::size_t>(m), last);
        products_.logits(weights_, m, group, logits_.data() + r * ld, ld_);
      }
      auto [own, own_end] = own_range(t0, t1);
      for (std::size_t r = t0; r < t1; ++r) {
        float* logit = logits_.data() + r * ld;
        const float bias = config_.bias ? bias_[static_cast<std::size_t>(active_.row(r))] : 0.0f;
        shift[r - t0] = bias - (active_.log_q.empty() ? 0.0f : active_.log_q[r]);
        const std::size_t own_begin = own;
        for (; own < own_end && static_cast<std::size_t>(active_.own[own].position) == r; ++own)
          own_logits_[own] = logit[active_.own[own].point] + bias;
        if (!active_.own_only.empty() && active_.own_only[r] != 0) std::fill_n(logit, points, kMinusInf);
        for (std::size_t i = own_begin; i < own; ++i)  // a point's own labels are not corrected
          logit[active_.own[i].point] = own_logits_[i] - shift[r - t0];
      }
      kern.column_exp_sum(logits_.data() + t0 * ld, static_cast<std::ptrdiff_t>(t1 - t0), ld_, n, shift,
                          part_max_.data() + t0 / tile * ld, part_sum_.data() + t0 / tile * ld);
    }
  });
  pool_.ranges(points, 16, [&](std::size_t begin, std::size_t end) {
    kern.combine_log_sum(part_max_.data() + begin, part_sum_.data() + begin, static_cast<std::ptrdiff_t>(tiles), ld_,
                         static_cast<std::ptrdiff_t>(end - begin), lse + begin);
  });
}

void OutputLayer::gradient_shared(const float* lse, std::size_t points, double* loss_parts) {
  const Kernels& kern = kernels();
  const auto ld = static_cast<std::size_t>(ld_);
  const auto n = static_cast<std::ptrdiff_t>(points);
  const std::size_t tile = tile_rows();
  products_.start_gradient(active_.row_count, ld_);
  pool_.ranges(active_.row_count, tile, [&](std::size_t first, std::size_t last) {
    for (std::size_t t0 = first; t0 < last; t0 += tile) {
      const std::size_t t1 = std::min(t0 + tile, last);
      const auto [own, own_end] = own_range(t0, t1);
      // exp(z - lse) = exp(z - the tile's maximum) exp(the tile's maximum - lse): the exponentials are there already.
      float* factor = part_max_.data() + t0 / tile * ld;
      kern.softmax_gradient(factor, lse, scale_.data(), n);
      for (std::size_t r = t0; r < t1; ++r) kern.multiply(logits_.data() + r * ld, factor, n);
      double loss = 0.0;
      for (std::size_t i = own; i < own_end; ++i) {
        const auto point = static_cast<std::size_t>(active_.own[i].point);
        loss += static_cast<double>(target_[point]) * static_cast<double>(lse[point] - own_logits_[i]);
        logits_[static_cast<std::size_t>(active_.own[i].position) * ld + point] -= target_[point];
      }
      loss_parts[t0 / tile] = loss;
      products_.take_gradient(logits_.data(), t0, t1, ld_);
    }
  });
}

void OutputLayer::hidden_gradient_shared(std::size_t points, float* dh) {
  constexpr std::size_t kChunk = 1024, kDepth = 256;  // rows packed at a time; rows in the cache at a time
  const auto mr = static_cast<std::size_t>(kernels().mr), hidden = static_cast<std::size_t>(config_.hidden);
  const std::size_t rows = active_.row_count;
  const auto width = static_cast<std::size_t>(products_.padded_hidden());
  const bool direct = width == hidden;  // else the product is padded and is copied at the end
  float* out = direct ? dh : copy_.at_least(points * width);
  std::fill_n(out, points * width, 0.0f);
  for (std::size_t c0 = 0; c0 < rows; c0 += kChunk) {
    const std::size_t c1 = std::min(c0 + kChunk, rows);
    products_.pack_active(pool_, weights_, active_, c0, c1);
    pool_.ranges(points, mr, [&](std::size_t begin, std::size_t end) {
      for (std::size_t k0 = c0; k0 < c1; k0 += kDepth) {
        const std::size_t k1 = std::min(k0 + kDepth, c1);
        for (std::size_t p = begin; p < end; p += mr)
          products_.hidden_gradient(logits_.data(), ld_, k0, k1, static_cast<int>(std::min(end - p, mr)), p,
                                    out + p * width);
      }
    });
  }
  if (!direct)
    for (std::size_t p = 0; p < points; ++p) std::copy_n(out + p * width, hidden, dh + p * hidden);
}

void OutputLayer::update_shared(const WeightTable::Step& step) {
  const auto mr = static_cast<std::size_t>(kernels().mr);
  products_.pack_points(pool_, h_, static_cast<std::ptrdiff_t>(points_));
  const auto width = static_cast<std::size_t>(products_.padded_hidden());
  pool_.run([&](int thread) {
    const auto [begin, end] = Pool::part(active_.row_count, mr, thread, pool_.threads());
    float* g = scratch_[static_cast<std::size_t>(thread)].at_least((mr + 1) * width);
    float* row = g + mr * width;
    for (std::size_t r = begin; r < end; r += mr) {
      const int m = static_cast<int>(std::min(end - r, mr));
      prefetch_rows(r + mr, end);
      for (std::size_t i = r + mr; i < std::min(end, r + 2 * mr); ++i) state_.prefetch(active_.row(i));
      products_.weight_gradient(logits_.data(), ld_, r, m, g);
      for (int i = 0; i < m; ++i) {
        const std::size_t position = r + static_cast<std::size_t>(i);
        float bias_gradient = 0.0f;
        if (config_.bias)
          for (std::size_t p = 0; p < points_; ++p) bias_gradient += logits_[position * static_cast<std::size_t>(ld_) + p];
        update_row(active_.row(position), g + static_cast<std::size_t>(i) * width, bias_gradient, step, row);
      }
    }
  });
}

}  // namespace dslide
