// Counter-based random numbers: Philox4x32-10 (Salmon et al., SC 2011).
//
// Every draw is keyed by (seed, purpose, two counters), so that it is the same for any number of threads
// and ranks and can be repeated without a state.
#pragma once

#include <array>
#include <cstdint>

namespace dslide {

enum class Purpose : std::uint32_t {
  kInputWeights = 1,
  kInputBias,
  kOutputWeights,
  kOutputBias,
  kDropout,
  kUniformExtras,
  kHashFunctions,
  kTopUp,
  kMinHashBits,
  kReservoir,
  kTableOrder,
  kLogUniformExtras,
  kInputRounding,
  kOutputRounding,
};

class Philox {
 public:
  Philox(std::uint64_t seed, Purpose purpose)
      : key_{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32) ^
                                                   (static_cast<std::uint32_t>(purpose) * 0x9E3779B9u)} {}

  // Four words for the counter pair (a, b).
  std::array<std::uint32_t, 4> operator()(std::uint64_t a, std::uint64_t b) const {
    std::array<std::uint32_t, 4> c{static_cast<std::uint32_t>(a), static_cast<std::uint32_t>(a >> 32),
                                   static_cast<std::uint32_t>(b), static_cast<std::uint32_t>(b >> 32)};
    std::uint32_t k0 = key_[0], k1 = key_[1];
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c[0], p1 = std::uint64_t{0xCD9E8D57u} * c[2];
      c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
           static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return c;
  }

  const std::uint32_t* key() const { return key_.data(); }

  // For another generator.
  std::uint64_t seed() const {
    const auto words = (*this)(0, 0);
    return std::uint64_t{words[0]} << 32 | words[1];
  }

  // An integer in [0, bound), bound > 0, from one word (multiply-shift; the bias is below bound / 2^32).
  static std::uint32_t below(std::uint32_t word, std::uint32_t bound) {
    return static_cast<std::uint32_t>((std::uint64_t{word} * bound) >> 32);
  }

 private:
  std::array<std::uint32_t, 2> key_;
};

}  // namespace dslide
