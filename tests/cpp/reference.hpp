// Slow, readable versions of the fast kernels, in double precision. The tests hold the two together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
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

}  // namespace reference
