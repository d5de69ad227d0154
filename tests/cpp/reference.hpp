// Slow, readable versions of the fast kernels, in double precision. The tests hold the two together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace reference {

using Matrix = std::vector<std::vector<double>>;

// c = a · b^T
inline Matrix product_transposed(const Matrix& a, const Matrix& b) {
  Matrix c(a.size(), std::vector<double>(b.size(), 0.0));
  for (std::size_t i = 0; i < a.size(); ++i)
    for (std::size_t j = 0; j < b.size(); ++j)
      for (std::size_t k = 0; k < a[i].size(); ++k) c[i][j] += a[i][k] * b[j][k];
  return c;
}

inline double log_sum_exp(const std::vector<double>& x) {
  if (x.empty()) return -std::numeric_limits<double>::infinity();
  const double top = *std::max_element(x.begin(), x.end());
  if (std::isinf(top)) return top;
  double sum = 0.0;
  for (const double v : x) sum += std::exp(v - top);
  return top + std::log(sum);
}

}  // namespace reference
