#include "init.hpp"

#include <algorithm>

namespace dslide {

void fill_normal(const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin, std::int64_t end,
                 float std, float* out, std::ptrdiff_t ld) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t u = begin / 4 * 4; u < end; u += 4) {
      const auto draws = random.normal(static_cast<std::uint64_t>(first + r), static_cast<std::uint64_t>(u / 4));
      for (std::int64_t i = std::max(u, begin); i < std::min(u + 4, end); ++i)
        out[r * ld + (i - begin)] = std * draws[static_cast<std::size_t>(i - u)];
    }
  }
}

void fill_normal(Pool& pool, const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin,
                 std::int64_t end, float std, float* out, std::ptrdiff_t ld) {
  pool.ranges(static_cast<std::size_t>(rows), 1, [&](std::size_t b, std::size_t e) {
    const auto from = static_cast<std::int64_t>(b);
    fill_normal(random, first + from, static_cast<std::int64_t>(e - b), begin, end, std, out + from * ld, ld);
  });
}

}  // namespace dslide
