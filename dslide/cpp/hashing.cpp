#include "hashing.hpp"

#include <algorithm>
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
  SimHash(std::int64_t dim, int k, int l, std::uint64_t seed) : dim_(dim), k_(k), l_(l) {
    check(dim, k, l, 1);
    const std::int64_t n = std::int64_t{k} * l;
    const Philox random(seed, Purpose::kHashFunctions);
    std::vector<float> projections(static_cast<std::size_t>(dim * n), 0.0f);  // [n, dim]
    const auto take = static_cast<std::size_t>(std::max<std::int64_t>(1, (dim + 2) / 3));
    std::vector<std::int32_t> order(static_cast<std::size_t>(dim));
    for (std::int64_t j = 0; j < n; ++j) {
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t i = 0; i < take; ++i) {  // the first steps of a Fisher-Yates shuffle
        const auto words = random(static_cast<std::uint64_t>(j), i);
        const std::size_t other = i + Philox::below(words[0], static_cast<std::uint32_t>(order.size() - i));
        std::swap(order[i], order[other]);
        projections[static_cast<std::size_t>(j * dim + order[i])] = (words[1] & 1u) ? 1.0f : -1.0f;
      }
    }
    packed_.resize(dim, n);
    packed_.pack_transposed(0, n, projections.data(), dim);
  }

  void hash(Pool& pool, const float* x, std::size_t count, std::uint32_t* codes, std::size_t stride) const override {
    const auto mr = static_cast<std::size_t>(kernels().mr);
    const auto width = static_cast<std::size_t>(packed_.padded());
    pool.ranges(count, mr, [&](std::size_t begin, std::size_t end) {
      Buffer<float> scores(mr * width);
      for (std::size_t i = begin; i < end; i += mr) {
        const int m = static_cast<int>(std::min(end - i, mr));
        const float* a[16];
        for (int r = 0; r < m; ++r) a[r] = x + (static_cast<std::int64_t>(i) + r) * dim_;
        packed_.multiply(m, a, 1, 0, dim_, scores.data(), static_cast<std::ptrdiff_t>(width), false);
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
  std::int64_t dim_;
  int k_, l_;
  PackedMatrix packed_;  // [dim, K L]
};

class Dwta : public HashFamily {
 public:
  static constexpr int kBin = 8, kCodeBits = 3;

  Dwta(std::int64_t dim, int k, int l, std::uint64_t seed, bool published)
      : dim_(dim), k_(k), l_(l), published_(published), random_(seed, Purpose::kHashFunctions) {
    check(dim, k, l, kCodeBits);
    const std::size_t bins = static_cast<std::size_t>(k) * static_cast<std::size_t>(l);
    positions_.reserve(bins * kBin);
    std::vector<std::int32_t> order(static_cast<std::size_t>(dim));
    for (std::uint64_t permutation = 0; positions_.size() < bins * kBin; ++permutation) {
      std::iota(order.begin(), order.end(), 0);
      for (std::size_t i = 0; i + 1 < order.size(); ++i) {
        const auto words = random_(permutation, i);
        std::swap(order[i], order[i + Philox::below(words[0], static_cast<std::uint32_t>(order.size() - i))]);
      }
      for (std::size_t i = 0; i < order.size() && positions_.size() < bins * kBin; ++i) positions_.push_back(order[i]);
    }
  }

  void hash(Pool& pool, const float* x, std::size_t count, std::uint32_t* codes, std::size_t stride) const override {
    const int bins = k_ * l_;
    pool.ranges(count, 1, [&](std::size_t begin, std::size_t end) {
      std::vector<std::int8_t> code(static_cast<std::size_t>(bins));
      for (std::size_t i = begin; i < end; ++i) {
        const float* v = x + static_cast<std::int64_t>(i) * dim_;
        for (int b = 0; b < bins; ++b) code[static_cast<std::size_t>(b)] = winner(v, b);
        for (int t = 0; t < l_; ++t) {
          std::uint32_t index = 0;
          for (int j = 0; j < k_; ++j) {
            const int b = t * k_ + j;
            std::int8_t c = code[static_cast<std::size_t>(b)];
            if (c < 0) c = borrow(code, b);
            index = published_ ? (index << 2) + static_cast<std::uint32_t>(c)
                               : (index << kCodeBits) | static_cast<std::uint32_t>(c);
          }
          codes[static_cast<std::size_t>(t) * stride + i] = index;
        }
      }
    });
  }
  std::uint32_t buckets() const override { return 1u << (kCodeBits * k_); }
  int tables() const override { return l_; }

 private:
  std::int8_t winner(const float* v, int bin) const {
    const std::int32_t* at = positions_.data() + static_cast<std::size_t>(bin) * kBin;
    std::int8_t best = -1;
    float top = 0.0f;
    for (int i = 0; i < kBin; ++i) {
      const float value = v[at[i]];
      if (value != 0.0f && (best < 0 || value > top)) {
        best = static_cast<std::int8_t>(i);
        top = value;
      }
    }
    return best;
  }
  // Densification: a universal hash of (bin, attempt) names the next bin to ask.
  std::int8_t borrow(const std::vector<std::int8_t>& code, int bin) const {
    for (std::uint32_t attempt = 1; attempt <= 100; ++attempt) {
      const std::uint32_t mixed = (static_cast<std::uint32_t>(bin) * 100u + attempt) * 2654435761u;
      const std::int8_t c = code[Philox::below(mixed, static_cast<std::uint32_t>(code.size()))];
      if (c >= 0) return c;
    }
    return 0;
  }

  std::int64_t dim_;
  int k_, l_;
  bool published_;
  Philox random_;
  std::vector<std::int32_t> positions_;  // [K L, kBin]
};

}  // namespace

std::unique_ptr<HashFamily> make_simhash(std::int64_t dim, int k, int l, std::uint64_t seed) {
  return std::make_unique<SimHash>(dim, k, l, seed);
}

std::unique_ptr<HashFamily> make_dwta(std::int64_t dim, int k, int l, std::uint64_t seed, bool published) {
  return std::make_unique<Dwta>(dim, k, l, seed, published);
}

}  // namespace dslide
