#include "init.hpp"

#include <algorithm>
#include <vector>

#include "kernels.hpp"

namespace dslide {

void fill_normal(const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin, std::int64_t end,
                 float std, float* out, std::ptrdiff_t ld) {
  constexpr std::int64_t kRows = 64;
  if (end <= begin) return;
  const std::int64_t column = begin / 4, columns = (end + 3) / 4 - column, offset = begin - 4 * column;
  std::vector<float> draws(static_cast<std::size_t>(kRows * columns * 4));
  for (std::int64_t r0 = 0; r0 < rows; r0 += kRows) {
    const std::int64_t count = std::min(kRows, rows - r0);
    kernels().normals(random.key(), static_cast<std::uint64_t>(first + r0), static_cast<std::uint64_t>(column), count,
                      columns, std, draws.data());
    for (std::int64_t r = 0; r < count; ++r)
      std::copy_n(draws.data() + r * columns * 4 + offset, end - begin, out + (r0 + r) * ld);
  }
}

void fill_normal(Pool& pool, const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin,
                 std::int64_t end, float std, float* out, std::ptrdiff_t ld) {
  pool.ranges(static_cast<std::size_t>(rows), 1, [&](std::size_t b, std::size_t e) {
    const auto from = static_cast<std::int64_t>(b);
    fill_normal(random, first + from, static_cast<std::int64_t>(e - b), begin, end, std, out + from * ld, ld);
  });
}

void fill_normal(Pool& pool, const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin,
                 std::int64_t end, float std, WeightTable& out) {
  if (!out.half()) {
    fill_normal(pool, random, first, rows, begin, end, std, out.floats().data(), static_cast<std::ptrdiff_t>(end - begin));
    return;
  }
  constexpr std::int64_t kRows = 64;
  pool.ranges(static_cast<std::size_t>(rows), 1, [&](std::size_t b, std::size_t e) {
    Buffer<float> some(static_cast<std::size_t>(kRows * (end - begin)));
    for (auto r0 = static_cast<std::int64_t>(b); r0 < static_cast<std::int64_t>(e); r0 += kRows) {
      const std::int64_t count = std::min(kRows, static_cast<std::int64_t>(e) - r0);
      fill_normal(random, first + r0, count, begin, end, std, some.data(), static_cast<std::ptrdiff_t>(end - begin));
      for (std::int64_t r = 0; r < count; ++r) out.set(r0 + r, some.data() + r * (end - begin));
    }
  });
}

}  // namespace dslide
