// Which features a thread or a share has, told from their ids alone.
#pragma once

#include <cstdint>

namespace dslide {

// Runs of kRun features are dealt out to `units` units by a hash, as the frequent ones lie together; these are the features of
// the units [first, first + count).
struct FeatureUnits {
  static constexpr std::int32_t kRun = 64;  // no two threads share a cache line of what they write by feature
  static constexpr std::uint32_t kFactor = 0x9E3779B9u;
  std::uint64_t units;
  std::uint32_t first, count;

  // Always inlined, so that no copy for another CPU is linked in (kernels.hpp).
  __attribute__((always_inline)) bool has(std::int32_t feature) const {
    const std::uint32_t hash = static_cast<std::uint32_t>(feature / kRun) * kFactor;
    return static_cast<std::uint32_t>(hash * units >> 32) - first < count;
  }
};

}  // namespace dslide
