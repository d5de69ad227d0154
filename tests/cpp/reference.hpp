// Slow, readable versions of the fast kernels, in double precision. The tests hold the two together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace reference {

inline double log_sum_exp(const std::vector<double>& x) {
  if (x.empty()) return -std::numeric_limits<double>::infinity();
  const double top = *std::max_element(x.begin(), x.end());
  if (std::isinf(top)) return top;
  double sum = 0.0;
  for (const double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

// The nearest bfloat16, found by trying both neighbours; ties to the even one.
inline double from_bfloat16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t{half} << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline std::uint16_t to_bfloat16(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const auto low = static_cast<std::uint16_t>(bits >> 16);
  if (std::isnan(x)) return static_cast<std::uint16_t>(low | 0x40u);
  if (std::isinf(x)) return low;
  const auto high = static_cast<std::uint16_t>(low + 1);  // away from zero
  const double to_low = std::abs(x - from_bfloat16(low));
  // The distance to infinity counts as if the exponent went on.
  const double to_high = (high & 0x7FFFu) == 0x7F80u ? std::abs(std::ldexp(1.0, 128) - std::abs(double{x})) : std::abs(x - from_bfloat16(high));
  return to_low < to_high || (to_low == to_high && low % 2 == 0) ? low : high;
}

}  // namespace reference
