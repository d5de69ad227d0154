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
constexpr int kMaxTile = 16;
constexpr std::size_t kMostTileRows = 256;

}  // namespace

std::size_t OutputLayer::tile_rows() const { return active_.row_count > 16384 ? kMostTileRows : 32; }

void OutputLayer::prefetch_rows(std::size_t position, std::size_t end) const {
  end = std::min(end, position + static_cast<std::size_t>(kernels().mr));
  for (; position < end; ++position) {
    const float* row = row_weights(active_.row(position));
    for (std::int64_t i = 0; i < config_.hidden; i += 16) __builtin_prefetch(row + i);
  }
}

void OutputLayer::forward_shared(const float* h, std::size_t points, float* lse) {
  const Kernels& kern = kernels();
  const auto n = static_cast<std::ptrdiff_t>(points);
  packed_h_transposed_.resize(config_.hidden, n);
  pool_.ranges(points, static_cast<std::size_t>(kern.nr), [&](std::size_t begin, std::size_t end) {
    packed_h_transposed_.pack_transposed(static_cast<std::ptrdiff_t>(begin), static_cast<std::ptrdiff_t>(end), h,
                                         config_.hidden);
  });
  // Not a power of two, so that a column's values lie in different sets of the cache.
  ld_ = packed_h_transposed_.padded() + 16;
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
        const float* a[kMaxTile];
        for (int i = 0; i < m; ++i) a[i] = row_weights(active_.row(r + static_cast<std::size_t>(i)));
        prefetch_rows(r + static_cast<std::size_t>(m), last);
        packed_h_transposed_.multiply(m, a, 1, 0, config_.hidden, logits_.data() + r * ld, ld_, false);
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
    }
  });
}

void OutputLayer::hidden_gradient_shared(std::size_t points, float* dh) {
  constexpr std::size_t kChunk = 1024, kDepth = 256;  // rows packed at a time; rows in the cache at a time
  const Kernels& kern = kernels();
  const auto mr = static_cast<std::size_t>(kern.mr), hidden = static_cast<std::size_t>(config_.hidden);
  const std::size_t rows = active_.row_count;
  packed_rows_.resize(static_cast<std::ptrdiff_t>(std::min(kChunk, rows)), config_.hidden);
  const auto width = static_cast<std::size_t>(packed_rows_.padded());
  const bool direct = width == hidden;  // else the product is padded and is copied at the end
  float* out = direct ? dh : copy_.at_least(points * width);
  std::fill_n(out, points * width, 0.0f);
  for (std::size_t c0 = 0; c0 < rows; c0 += kChunk) {
    const std::size_t c1 = std::min(c0 + kChunk, rows);
    packed_rows_.resize(static_cast<std::ptrdiff_t>(c1 - c0), config_.hidden);
    pool_.ranges(c1 - c0, 16, [&](std::size_t begin, std::size_t end) {
      packed_rows_.pack_rows(static_cast<std::ptrdiff_t>(begin), static_cast<std::ptrdiff_t>(end),
                             [&](std::ptrdiff_t k) { return row_weights(active_.row(c0 + static_cast<std::size_t>(k))); });
    });
    pool_.ranges(points, mr, [&](std::size_t begin, std::size_t end) {
      for (std::size_t k0 = c0; k0 < c1; k0 += kDepth) {
        const std::size_t k1 = std::min(k0 + kDepth, c1);
        for (std::size_t p = begin; p < end; p += mr) {
          const int m = static_cast<int>(std::min(end - p, mr));
          const float* a[kMaxTile];
          for (int i = 0; i < m; ++i)
            a[i] = logits_.data() + k0 * static_cast<std::size_t>(ld_) + p + static_cast<std::size_t>(i);
          packed_rows_.multiply(m, a, ld_, static_cast<std::ptrdiff_t>(k0 - c0), static_cast<std::ptrdiff_t>(k1 - c0),
                                out + p * width, static_cast<std::ptrdiff_t>(width), true);
        }
      }
    });
  }
  if (!direct)
    for (std::size_t p = 0; p < points; ++p) std::copy_n(out + p * width, hidden, dh + p * hidden);
}

void OutputLayer::update_shared(float step_size) {
  const Kernels& kern = kernels();
  const auto mr = static_cast<std::size_t>(kern.mr);
  packed_h_.resize(static_cast<std::ptrdiff_t>(points_), config_.hidden);
  pool_.ranges(points_, 16, [&](std::size_t begin, std::size_t end) {
    packed_h_.pack_rows(static_cast<std::ptrdiff_t>(begin), static_cast<std::ptrdiff_t>(end),
                        [&](std::ptrdiff_t p) { return h_ + p * config_.hidden; });
  });
  const std::ptrdiff_t width = packed_h_.padded();
  pool_.run([&](int thread) {
    const auto [begin, end] = Pool::part(active_.row_count, mr, thread, pool_.threads());
    float* g = scratch_[static_cast<std::size_t>(thread)].at_least(mr * static_cast<std::size_t>(width));
    for (std::size_t r = begin; r < end; r += mr) {
      const int m = static_cast<int>(std::min(end - r, mr));
      const float* a[kMaxTile];
      for (int i = 0; i < m; ++i) a[i] = logits_.data() + (r + static_cast<std::size_t>(i)) * static_cast<std::size_t>(ld_);
      prefetch_rows(r + mr, end);
      for (std::size_t i = r + mr; i < std::min(end, r + 2 * mr); ++i) state_.prefetch(active_.row(i));
      packed_h_.multiply(m, a, 1, 0, static_cast<std::ptrdiff_t>(points_), g, width, false);
      for (int i = 0; i < m; ++i) {
        float bias_gradient = 0.0f;
        if (config_.bias)
          for (std::size_t p = 0; p < points_; ++p) bias_gradient += a[i][p];
        update_row(active_.row(r + static_cast<std::size_t>(i)), g + i * width, bias_gradient, step_size);
      }
    }
  });
}

}  // namespace dslide
