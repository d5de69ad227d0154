#include "hashing.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "kernels.hpp"
#include "philox.hpp"

namespace dslide {
namespace {

void check(std::int64_t dim, int k, int l, int bits_a_code) {
  if (dim < 1 || k < 1 || l < 1 || l > 4096) throw std::invalid_argument("hash family: K, L and the width must be positive");
  if (k * bits_a_code > 24)
    throw std::invalid_argument("hash family: K = " + std::to_string(k) + " needs more than 2^24 buckets a table");
}

class SimHash : public HashFamily {
 public:
  SimHash(std::int64_t dim, const HashConfig& config, std::uint64_t seed) : dim_(dim), k_(config.k), l_(config.l) {
    check(dim, k_, l_, 1);
    const std::int64_t n = std::int64_t{k_} * l_;
    std::vector<float> projections(static_cast<std::size_t>(dim * n), 0.0f);  // [n, dim]
    if (config.dense_projections) dense(n, seed, projections);
    else sparse(n, seed, projections);
    packed_.resize(dim, n);
    packed_.pack_transposed(0, n, projections.data(), dim);
  }

  void hash(Pool& pool, const float* x, std::size_t count, std::uint32_t* codes, std::size_t stride) const override {
    const auto mr = static_cast<std::size_t>(kernels().mr);
    const auto width = static_cast<std::size_t>(packed_.padded());
    pool.ranges(count, mr, [&](std::size_t begin, std::size_t end) {
      Buffer<float> scores(mr * width);
      std::vector<const float*> a(mr);
      for (std::size_t i = begin; i < end; i += mr) {
        const int m = static_cast<int>(std::min(end - i, mr));
        for (int r = 0; r < m; ++r) a[static_cast<std::size_t>(r)] = x + (static_cast<std::int64_t>(i) + r) * dim_;
        packed_.multiply(m, a.data(), 1, {0, dim_, 0, packed_.n()}, scores.data(), static_cast<std::ptrdiff_t>(width), false);
        for (int r = 0; r < m; ++r) {
          const float* score = scores.data() + static_cast<std::size_t>(r) * width;
          for (int t = 0; t < l_; ++t) {
            std::uint32_t code = 0;
            for (int b = 0; b < k_; ++b) code = code << 1 | (score[t * k_ + b] > 0.0f ? 1u : 0u);
            codes[static_cast<std::size_t>(t) * stride + i + static_cast<std::size_t>(r)] = code;
          }
        }
      }
    });
  }
  std::uint32_t buckets() const override { return 1u << k_; }
  int tables() const override { return l_; }

 private:
  void dense(std::int64_t n, std::uint64_t seed, std::vector<float>& projections) const {
    const Philox random(seed, Purpose::kHashFunctions);
    const std::int64_t four = (dim_ + 3) / 4;  // the kernel draws four numbers at a time
    std::vector<float> row(static_cast<std::size_t>(4 * four));
    for (std::int64_t j = 0; j < n; ++j) {
      kernels().normals(random.key(), static_cast<std::uint64_t>(j), 0, 1, static_cast<std::ptrdiff_t>(four), 1.0f, row.data());
      std::copy_n(row.data(), dim_, projections.data() + j * dim_);
    }
  }
  void sparse(std::int64_t n, std::uint64_t seed, std::vector<float>& projections) const {
    const Philox random(seed, Purpose::kHashFunctions);
    const auto take = static_cast<std::size_t>(std::max<std::int64_t>(1, (dim_ + 2) / 3));
    std::vector<std::int32_t> order(static_cast<std::size_t>(dim_));
    for (std::int64_t j = 0; j < n; ++j) {
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t i = 0; i < take; ++i) {  // the first steps of a Fisher-Yates shuffle
        const auto words = random(static_cast<std::uint64_t>(j), i);
        const std::size_t other = i + Philox::below(words[0], static_cast<std::uint32_t>(order.size() - i));
        std::swap(order[i], order[other]);
        projections[static_cast<std::size_t>(j * dim_ + order[i])] = (words[1] & 1u) ? 1.0f : -1.0f;
      }
    }
  }

  std::int64_t dim_;
  int k_, l_;
  PackedMatrix packed_;  // [dim, K L]
};

constexpr int kBin = 8, kCodeBits = 3;

// Bins of 8 coordinates [bins, 8]: permutations one after another, each cut into bins; or, with `independent`, the first
// 8 of a permutation for every bin.
std::vector<std::int32_t> draw_bins(std::int64_t dim, std::size_t bins, bool independent, std::uint64_t seed) {
  const Philox random(seed, Purpose::kHashFunctions);
  const auto width = static_cast<std::size_t>(dim);
  std::vector<std::int32_t> positions, order(width);
  positions.reserve(bins * kBin);
  for (std::uint64_t permutation = 0; positions.size() < bins * kBin; ++permutation) {
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = 0; i + 1 < width; ++i) {
      const auto words = random(permutation, i);
      std::swap(order[i], order[i + Philox::below(words[0], static_cast<std::uint32_t>(width - i))]);
    }
    const std::size_t take = independent ? std::min<std::size_t>(kBin - positions.size() % kBin, width) : width;
    for (std::size_t i = 0; i < take && positions.size() < bins * kBin; ++i) positions.push_back(order[i]);
  }
  return positions;
}

// Densification: a universal hash of (bin, attempt) names the next bin to ask. Returns a bin with a code that is not
// negative, or -1 if a hundred attempts find none.
std::ptrdiff_t bin_to_borrow(const std::vector<std::int8_t>& code, std::size_t bin) {
  for (std::uint32_t attempt = 1; attempt <= 100; ++attempt) {
    const std::uint32_t mixed = (static_cast<std::uint32_t>(bin) * 100u + attempt) * 2654435761u;
    const auto other = Philox::below(mixed, static_cast<std::uint32_t>(code.size()));
    if (code[other] >= 0) return other;
  }
  return -1;
}

class WinnerTakeAll : public HashFamily {
 public:
  WinnerTakeAll(std::int64_t dim, const HashConfig& config, std::uint64_t seed)
      : dim_(dim), config_(config), densified_(config.family == HashConfig::Family::kDwta) {
    check(dim, config.k, config.l, kCodeBits);
    const auto bins = static_cast<std::size_t>(config.k) * static_cast<std::size_t>(config.l);
    positions_ = draw_bins(dim, bins, !densified_, seed);
  }

  // As many rows side by side as a panel has, so that one comparison serves several.
  void hash(Pool& pool, const float* x, std::size_t count, std::uint32_t* codes, std::size_t stride) const override {
    const Kernels& kern = kernels();
    const auto side = static_cast<std::size_t>(kern.nr);
    const std::size_t bins = positions_.size() / kBin;
    pool.ranges(count, side, [&](std::size_t begin, std::size_t end) {
      Buffer<float> rows(static_cast<std::size_t>(dim_) * side);
      Buffer<std::int32_t> best(bins * side);
      for (std::size_t i = begin; i < end; i += side) {
        const std::size_t size = std::min(side, end - i);
        kern.pack_panel(x + static_cast<std::int64_t>(i) * dim_, dim_, static_cast<std::ptrdiff_t>(size), dim_, rows.data());
        if (kern.winners(rows.data(), dim_, config_.zeros_are_values, positions_.data(), static_cast<std::ptrdiff_t>(bins),
                         best.data()))
          for (std::size_t r = 0; r < size; ++r) borrow(best.data() + r, side, bins);
        kern.join_codes(best.data(), config_.l, config_.k, shift(), static_cast<std::ptrdiff_t>(size), codes + i,
                        static_cast<std::ptrdiff_t>(stride));
      }
    });
  }
  std::uint32_t buckets() const override {
    std::uint32_t largest = 0;
    for (int code = 0; code < config_.k; ++code) largest = (largest << shift()) + (kBin - 1);
    return largest + 1;
  }
  int tables() const override { return config_.l; }

 private:
  int shift() const { return config_.published_packing ? 2 : kCodeBits; }
  // Gives a code to the bins of a row that have none (-1); bin b's lies at best[b * stride]. The row of a point whose hidden
  // units are all off has nothing to borrow, and isn't asked for it.
  void borrow(std::int32_t* best, std::size_t stride, std::size_t bins) const {
    std::vector<std::int8_t> code(bins);
    for (std::size_t b = 0; b < bins; ++b) code[b] = static_cast<std::int8_t>(best[b * stride]);
    const bool any = std::any_of(code.begin(), code.end(), [](std::int8_t c) { return c >= 0; });
    for (std::size_t b = 0; b < bins; ++b) {
      if (code[b] >= 0) continue;
      const std::ptrdiff_t other = densified_ && any ? bin_to_borrow(code, b) : -1;
      best[b * stride] = other < 0 ? 0 : code[static_cast<std::size_t>(other)];
    }
  }

  std::int64_t dim_;
  HashConfig config_;
  bool densified_;
  std::vector<std::int32_t> positions_;  // [K L, kBin]
};

class MinHash : public HashFamily {
 public:
  MinHash(std::int64_t dim, const HashConfig& config, std::uint64_t seed) : dim_(dim), k_(config.k), l_(config.l) {
    check(dim, k_, l_, kCodeBits);
    const auto bins = static_cast<std::size_t>(k_) * static_cast<std::size_t>(l_);
    positions_ = draw_bins(dim, bins, false, seed);
    const Philox random(seed, Purpose::kMinHashBits);
    bits_.resize(bins * static_cast<std::size_t>(dim));
    for (std::size_t i = 0; i < bits_.size(); ++i) bits_[i] = static_cast<std::uint8_t>(random(i, 0)[0] >> (32 - kCodeBits));
  }

  void hash(Pool& pool, const float* x, std::size_t count, std::uint32_t* codes, std::size_t stride) const override {
    const auto width = static_cast<std::size_t>(dim_), bins = positions_.size() / kBin, size = (width + 3) / 4;
    pool.ranges(count, 1, [&](std::size_t begin, std::size_t end) {
      std::vector<std::int32_t> order(width);
      std::vector<float> v(width);
      std::vector<std::uint8_t> member(width);
      std::vector<std::int8_t> first(bins);  // the place in its bin of the set's first member, -1: none
      for (std::size_t i = begin; i < end; ++i) {
        for (std::size_t j = 0; j < width; ++j) {  // a comparison needs an order, which nan has not
          const float value = x[i * width + j];
          v[j] = value == value ? value : -std::numeric_limits<float>::infinity();
        }
        std::iota(order.begin(), order.end(), 0);
        std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(size - 1), order.end(),
                         [&](std::int32_t a, std::int32_t b) {
                           const float left = v[static_cast<std::size_t>(a)], right = v[static_cast<std::size_t>(b)];
                           return left != right ? left > right : a < b;
                         });
        std::fill(member.begin(), member.end(), std::uint8_t{0});
        for (std::size_t j = 0; j < size; ++j) member[static_cast<std::size_t>(order[j])] = 1;
        for (std::size_t b = 0; b < bins; ++b) {
          const std::int32_t* at = positions_.data() + b * kBin;
          const auto* found = std::find_if(at, at + kBin, [&](std::int32_t c) { return member[static_cast<std::size_t>(c)] != 0; });
          first[b] = found == at + kBin ? std::int8_t{-1} : static_cast<std::int8_t>(found - at);
        }
        for (std::size_t t = 0; t < static_cast<std::size_t>(l_); ++t) {
          std::uint32_t index = 0;
          for (std::size_t j = 0; j < static_cast<std::size_t>(k_); ++j)
            index = (index << kCodeBits) | code(first, t * static_cast<std::size_t>(k_) + j);
          codes[t * stride + i] = index;
        }
      }
    });
  }
  std::uint32_t buckets() const override { return 1u << (kCodeBits * k_); }
  int tables() const override { return l_; }

 private:
  // The minimum's coordinate under this code's own table of random bits: minima that differ agree with probability 1/8.
  std::uint32_t code(const std::vector<std::int8_t>& first, std::size_t bin) const {
    const std::ptrdiff_t from = first[bin] >= 0 ? static_cast<std::ptrdiff_t>(bin) : bin_to_borrow(first, bin);
    if (from < 0) return 0;
    const auto place = static_cast<std::size_t>(from) * kBin + static_cast<std::size_t>(first[static_cast<std::size_t>(from)]);
    return bits_[bin * static_cast<std::size_t>(dim_) + static_cast<std::size_t>(positions_[place])];
  }

  std::int64_t dim_;
  int k_, l_;
  std::vector<std::int32_t> positions_;  // [K L, kBin]
  std::vector<std::uint8_t> bits_;       // [K L, dim]
};

}  // namespace

HashConfig::Family hash_family_from_name(const std::string& name) {
  using Family = HashConfig::Family;
  if (name == "simhash") return Family::kSimHash;
  if (name == "dwta") return Family::kDwta;
  if (name == "wta") return Family::kWta;
  if (name == "doph") return Family::kDoph;
  throw std::invalid_argument("unknown hash family '" + name + "'; choose simhash, dwta, wta or doph");
}

std::unique_ptr<HashFamily> make_hash_family(std::int64_t dim, const HashConfig& config, std::uint64_t seed) {
  switch (config.family) {
    case HashConfig::Family::kSimHash: return std::make_unique<SimHash>(dim, config, seed);
    case HashConfig::Family::kDoph: return std::make_unique<MinHash>(dim, config, seed);
    case HashConfig::Family::kDwta:
    case HashConfig::Family::kWta: break;
  }
  return std::make_unique<WinnerTakeAll>(dim, config, seed);
}

}  // namespace dslide
