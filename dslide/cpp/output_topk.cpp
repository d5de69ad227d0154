// Exact prediction: the best labels and the log-sum-exp over all of them, in one pass over the rows.
//
// Labels are cut into parts of kTopkPart, points into blocks; a thread packs a tile of rows once and multiplies it with
// every point of a block, so that one point alone is as well served as a thousand, and gets the same bits. What a part
// contributes to a point's sum is a function of the part alone: no number of threads changes a bit.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr std::size_t kRows = 128;  // labels of a packed tile: 64 KB at 128 hidden units
constexpr std::size_t kQueries = 32;  // points that pass a panel of it by
constexpr std::size_t kPoints = 256, kCandidates = std::size_t{1} << 20;  // of a block, at most

struct Candidate {
  float score;
  std::int32_t id;
};

// A total order, so that which candidates are the best k doesn't depend on the order in which they come.
bool better(const Candidate& a, const Candidate& b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

// The best k of what each of a block's points is offered: a list is cut back to k whenever it is full, in constant time
// a candidate for any k.
class BestLists {
 public:
  BestLists(std::size_t points, std::size_t k)
      : k_(k), capacity_(k + std::max<std::size_t>(k, 64)), items_(points * capacity_), sizes_(points, 0), bars_(points, kMinusInf) {}

  static std::size_t points_at_once(std::size_t k) {
    return std::clamp<std::size_t>(kCandidates / (k + std::max<std::size_t>(k, 64)), 1, kPoints);
  }

  // A score must be above this to matter, if ids are offered in ascending order.
  float bar(std::size_t point) const { return bars_[point]; }

  // Offers `count` scores, at most kRows, of ids from `first` on.
  void offer(std::size_t point, const float* scores, std::size_t count, std::int32_t first) {
    std::int32_t places[kRows];
    std::size_t found = 0;
    const float bar = bars_[point];
    for (std::size_t i = 0; i < count; ++i) {  // without a branch
      places[found] = static_cast<std::int32_t>(i);
      found += scores[i] > bar ? 1 : 0;
    }
    for (std::size_t i = 0; i < found; ++i)
      if (scores[places[i]] > bars_[point]) add(point, {scores[places[i]], first + places[i]});
  }

  // Adds a point's candidates, at most k, to `all`.
  void collect(std::size_t point, std::vector<Candidate>& all) const {
    const auto first = items_.begin() + static_cast<std::ptrdiff_t>(point * capacity_);
    all.insert(all.end(), first, first + static_cast<std::ptrdiff_t>(sizes_[point]));
  }

 private:
  void add(std::size_t point, const Candidate& candidate) {
    Candidate* list = items_.data() + point * capacity_;
    list[sizes_[point]++] = candidate;
    if (sizes_[point] < capacity_) return;
    std::nth_element(list, list + (k_ - 1), list + capacity_, better);
    sizes_[point] = k_;
    bars_[point] = list[k_ - 1].score;
  }

  std::size_t k_, capacity_;
  std::vector<Candidate> items_;  // [points, capacity]
  std::vector<std::size_t> sizes_;
  std::vector<float> bars_;
};

// What one thread found for the points of one block.
struct Piece {
  std::size_t block;
  BestLists lists;
};

}  // namespace

void OutputLayer::topk(const float* h, std::size_t points, int k, std::int32_t* ids, float* scores, double* lse) const {
  const Kernels& kern = kernels();
  const auto labels = static_cast<std::size_t>(config_.shard.size()), hidden = static_cast<std::size_t>(config_.hidden);
  const auto width = static_cast<std::size_t>(k), best = std::max<std::size_t>(1, std::min(width, labels));
  const std::size_t block_size = BestLists::points_at_once(best);
  const std::size_t blocks = (points + block_size - 1) / block_size, parts = (labels + kTopkPart - 1) / kTopkPart;
  std::vector<float> part_max(lse == nullptr ? 0 : parts * points, kMinusInf), part_sum(part_max.size(), 0.0f);
  std::vector<std::vector<Piece>> pieces(static_cast<std::size_t>(pool_.threads()));

  Buffer<std::uint16_t> half_h(config_.half ? points * hidden : 0);
  if (config_.half)
    pool_.ranges(points, 1, [&](std::size_t begin, std::size_t end) {
      kern.round(h + begin * hidden, static_cast<std::ptrdiff_t>((end - begin) * hidden), half_h.data() + begin * hidden);
    });

  pool_.run([&](int thread) {
    const auto [first, last] = Pool::part(blocks * parts, 1, thread, pool_.threads());
    PackedMatrix tile;
    PackedPairs half_tile;
    Buffer<float> logits(kQueries * kRows);
    for (std::size_t item = first; item < last; ++item) {
      const std::size_t block = item / parts, part = item % parts;
      const std::size_t p0 = block * block_size, p1 = std::min(points, p0 + block_size);
      auto& mine = pieces[static_cast<std::size_t>(thread)];
      if (mine.empty() || mine.back().block != block) mine.push_back({block, BestLists(p1 - p0, best)});
      BestLists& lists = mine.back().lists;
      const std::size_t part_end = std::min(labels, (part + 1) * kTopkPart);
      for (std::size_t r0 = part * kTopkPart; r0 < part_end; r0 += kRows) {
        const std::size_t rows = std::min(kRows, part_end - r0);
        const auto packed = static_cast<std::ptrdiff_t>(rows), from = static_cast<std::ptrdiff_t>(r0);
        if (config_.half) {
          half_tile.resize(config_.hidden, packed);
          half_tile.pack_transposed(0, packed, weights_.half_row(from), config_.hidden);
        } else {
          tile.resize(config_.hidden, packed);
          tile.pack_transposed(0, packed, weights_.row(from), config_.hidden);
        }
        for (std::size_t p = p0; p < p1; p += kQueries) {
          const std::size_t m = std::min(p1 - p, kQueries);
          if (config_.half) {
            const std::uint16_t* a[kQueries];
            for (std::size_t i = 0; i < m; ++i) a[i] = half_h.data() + (p + i) * hidden;
            half_tile.multiply(static_cast<std::ptrdiff_t>(m), a, 1, {0, config_.hidden, 0, packed}, logits.data(), kRows, false);
          } else {
            const float* a[kQueries];
            for (std::size_t i = 0; i < m; ++i) a[i] = h + (p + i) * hidden;
            tile.multiply(static_cast<std::ptrdiff_t>(m), a, 1, {0, config_.hidden, 0, packed}, logits.data(), kRows, false);
          }
          for (std::size_t i = 0; i < m; ++i) {
            float* logit = logits.data() + i * kRows;
            const std::size_t point = p + i;
            if (config_.bias)
              for (std::size_t r = 0; r < rows; ++r) logit[r] += bias_[r0 + r];
            float* max = lse == nullptr ? nullptr : &part_max[part * points + point];
            float* sum = lse == nullptr ? nullptr : &part_sum[part * points + point];
            const float top = kern.log_sum_update(logit, static_cast<std::ptrdiff_t>(rows), max, sum);
            if (top > lists.bar(point - p0))
              lists.offer(point - p0, logit, rows, static_cast<std::int32_t>(config_.shard.begin + static_cast<std::int64_t>(r0)));
          }
        }
      }
    }
  });

  pool_.ranges(points, 1, [&](std::size_t begin, std::size_t end) {
    std::vector<Candidate> all;
    for (std::size_t p = begin; p < end; ++p) {
      all.clear();
      for (const auto& of_thread : pieces)
        for (const Piece& piece : of_thread)
          if (piece.block == p / block_size) piece.lists.collect(p % block_size, all);
      const std::size_t found = std::min(width, all.size());
      std::partial_sort(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(found), all.end(), better);
      for (std::size_t i = 0; i < width; ++i) {
        ids[p * width + i] = i < found ? all[i].id : -1;
        scores[p * width + i] = i < found ? all[i].score : kMinusInf;
      }
      if (lse == nullptr) continue;
      float top = kMinusInf;
      for (std::size_t part = 0; part < parts; ++part) top = std::max(top, part_max[part * points + p]);
      double sum = 0.0;
      for (std::size_t part = 0; part < parts; ++part)
        if (part_sum[part * points + p] != 0.0f)
          sum += static_cast<double>(part_sum[part * points + p]) *
                 std::exp(static_cast<double>(part_max[part * points + p]) - static_cast<double>(top));
      lse[p] = static_cast<double>(top) + std::log(sum);
    }
  });
}

}  // namespace dslide
