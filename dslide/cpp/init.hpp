// Weight initialisation keyed by (seed, row, unit): the same values for any cut into shards.
#pragma once

#include <cstddef>
#include <cstdint>

#include "philox.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace dslide {

// out[r][0..end - begin) = N(0, std^2) for units [begin, end) (multiples of 4, or the last) of rows first + r.
void fill_normal(const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin, std::int64_t end,
                 float std, float* out, std::ptrdiff_t ld);

// The same over a pool.
void fill_normal(Pool& pool, const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin,
                 std::int64_t end, float std, float* out, std::ptrdiff_t ld);

// All of a table with width end - begin.
void fill_normal(Pool& pool, const Philox& random, std::int64_t first, std::int64_t rows, std::int64_t begin,
                 std::int64_t end, float std, WeightTable& out);

}  // namespace dslide
