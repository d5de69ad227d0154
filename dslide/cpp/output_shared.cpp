// The output layer where every point sees every active row (in-batch, uniform, full): dense products over the active
// rows, which are read where they lie. Logits are kept by row, [active rows, points]. They become exponentials and these
// gradients a tile at a time, while a product has them in the cache.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr std::size_t kTilePoints = 256;  // a tile of as many rows stays in the second cache

}  // namespace

std::size_t OutputLayer::tile_rows() const { return active_.row_count > 16384 ? OutputProducts::kMostRows : 32; }

void OutputLayer::forward_shared(std::size_t first_point, std::size_t last_point, float* lse) {
  products_.pack_queries(pool_, h_, points_, first_point, last_point);
  ld_ = products_.logits_ld();
  const auto ld = static_cast<std::size_t>(ld_);
  const std::size_t rows = active_.row_count, tile = tile_rows(), tiles = (rows + tile - 1) / tile;
  logits_.at_least(rows * ld);
  part_max_.at_least(std::max<std::size_t>(1, tiles) * ld);
  part_sum_.at_least(std::max<std::size_t>(1, tiles) * ld);
  own_logits_.resize(active_.own.size());
  pool_.ranges(rows, tile, [&](std::size_t first, std::size_t last) {
    for (std::size_t r = first; r < std::min(first + tile, last); ++r) prefetch_weights(r, last);
    for (std::size_t t0 = first; t0 < last; t0 += tile) {
      const std::size_t t1 = std::min(t0 + tile, last), next = std::min(tile, last - t1);
      for (std::size_t p0 = first_point; p0 < last_point; p0 += kTilePoints) {
        const std::size_t p1 = std::min(p0 + kTilePoints, last_point);
        const bool across = p1 == last_point;  // where the next tile begins
        const std::size_t next_p = across ? first_point : p1;
        const Ahead ahead = [&](std::size_t part, std::size_t parts) {
          const std::size_t begin = across ? t1 : t0, count = across ? next : t1 - t0;
          for (std::size_t r = begin + count * part / parts; r < begin + count * (part + 1) / parts; ++r) {
            if (across) prefetch_weights(r, last);
            prefetch(logits_.data() + r * ld + next_p, 4 * (std::min(next_p + kTilePoints, last_point) - next_p));
          }
        };
        if (across && !active_.all)  // all rows lie in the order of memory
          for (std::size_t r = t1; r < t1 + next; ++r) weights_.touch(active_.row(r));
        products_.logits(weights_, active_, t0, t1, p0, p1, logits_.data() + t0 * ld + p0, ld_, &ahead);
        exponentials_shared(t0, t1, p0, p1);
      }
    }
  });
  pool_.ranges(last_point - first_point, 16, [&](std::size_t begin, std::size_t end) {
    kernels().combine_log_sum(part_max_.data() + first_point + begin, part_sum_.data() + first_point + begin,
                              static_cast<std::ptrdiff_t>(tiles), ld_, static_cast<std::ptrdiff_t>(end - begin), lse + begin);
  });
}

void OutputLayer::exponentials_shared(std::size_t t0, std::size_t t1, std::size_t p0, std::size_t p1) {
  float shift[OutputProducts::kMostRows];
  const auto ld = static_cast<std::size_t>(ld_);
  auto [own, own_end] = own_range(t0, t1);
  for (std::size_t r = t0; r < t1; ++r) {
    float* logit = logits_.data() + r * ld;
    const float bias = config_.bias ? bias_[static_cast<std::size_t>(active_.row(r))] : 0.0f;
    shift[r - t0] = bias - (active_.log_q.empty() ? 0.0f : active_.log_q[r]);
    const std::size_t own_begin = own;
    for (; own < own_end && static_cast<std::size_t>(active_.own[own].position) == r; ++own)
      if (active_.own[own].among(p0, p1)) own_logits_[own] = logit[active_.own[own].point] + bias;
    if (!active_.own_only.empty() && active_.own_only[r] != 0) std::fill(logit + p0, logit + p1, kMinusInf);
    for (std::size_t i = own_begin; i < own; ++i)  // a point's own labels are not corrected
      if (active_.own[i].among(p0, p1)) logit[active_.own[i].point] = own_logits_[i] - shift[r - t0];
  }
  const std::size_t sums = t0 / tile_rows() * ld + p0;
  kernels().column_exp_sum(logits_.data() + t0 * ld + p0, static_cast<std::ptrdiff_t>(t1 - t0), ld_,
                           static_cast<std::ptrdiff_t>(p1 - p0), shift, part_max_.data() + sums, part_sum_.data() + sums);
}

double OutputLayer::loss_shared(const float* lse, std::size_t first_point, std::size_t last_point) {
  const std::size_t tile = tile_rows(), rows = active_.row_count;
  std::vector<double> parts((rows + tile - 1) / tile, 0.0);
  pool_.ranges(rows, tile, [&](std::size_t first, std::size_t last) {
    for (std::size_t t0 = first; t0 < last; t0 += tile) {
      // exp(z - lse) = exp(z - the tile's maximum) exp(the tile's maximum - lse): the first is there already.
      kernels().softmax_gradient(part_max_.data() + t0 / tile * static_cast<std::size_t>(ld_) + first_point, lse,
                                 scale_.data() + first_point, static_cast<std::ptrdiff_t>(last_point - first_point));
      const auto [own, own_end] = own_range(t0, std::min(t0 + tile, last));
      for (std::size_t i = own; i < own_end; ++i) {
        const auto point = static_cast<std::size_t>(active_.own[i].point);
        if (active_.own[i].among(first_point, last_point))
          parts[t0 / tile] += static_cast<double>(target_[point]) * static_cast<double>(lse[point - first_point] - own_logits_[i]);
      }
    }
  });
  double loss = 0.0;
  for (const double part : parts) loss += part;
  return loss;
}

OutputProducts::Gradient OutputLayer::gradient_shared() {
  const auto make = [this, tile = tile_rows()](std::size_t r0, std::size_t r1, std::size_t p0, std::size_t p1) {
    const auto ld = static_cast<std::size_t>(ld_);
    for (std::size_t r = r0; r < r1; ++r)
      kernels().multiply(logits_.data() + r * ld + p0, part_max_.data() + r / tile * ld + p0,
                         static_cast<std::ptrdiff_t>(p1 - p0));
    const auto [own, own_end] = own_range(r0, r1);
    for (std::size_t i = own; i < own_end; ++i) {
      const auto point = static_cast<std::size_t>(active_.own[i].point);
      if (active_.own[i].among(p0, p1)) logits_[static_cast<std::size_t>(active_.own[i].position) * ld + point] -= target_[point];
    }
  };
  return {logits_.data(), ld_, make};
}

void OutputLayer::update_shared(const WeightTable::Step& step, std::size_t first, std::size_t last) {
  constexpr std::size_t kUpdateRows = OutputProducts::kUpdateRows;
  const auto width = static_cast<std::size_t>(products_.padded_hidden());
  const OutputProducts::Gradient gradient = gradient_shared();
  pool_.run([&](int t) {
    const auto thread = static_cast<std::size_t>(t);
    const auto own = Pool::part(last - first, kUpdateRows, t, pool_.threads());
    const std::size_t begin = first + own.first, end = first + own.second;
    float *g = scratch_[thread].at_least(kUpdateRows * width), sums[kUpdateRows] = {};
    for (std::size_t r0 = begin; r0 < end; r0 += kUpdateRows) {
      const std::size_t r1 = std::min(r0 + kUpdateRows, end), next = std::min(kUpdateRows, end - r1);
      const Ahead ahead = [&](std::size_t part, std::size_t parts) {  // the update's rows, and the next gradients
        for (std::size_t r = r0 + (r1 - r0) * part / parts; r < r0 + (r1 - r0) * (part + 1) / parts; ++r) {
          prefetch_weights(r, end);
          state_.prefetch(active_.row(r));
        }
        for (std::size_t r = r1 + next * part / parts; r < r1 + next * (part + 1) / parts; r += 1)
          if (!config_.half || r % 2 == 0) prefetch(gradient.row(r), 4 * points_);
      };
      products_.weight_gradient(thread, gradient, r0, r1, g, config_.bias ? sums : nullptr, &ahead);
      for (std::size_t r = r0; r < r1; ++r)
        update_row(active_.row(r), g + (r - r0) * width, sums[r - r0], step);
    }
  });
}

}  // namespace dslide
