// Hash families over dense vectors: SimHash and densified winner-take-all (DWTA).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gemm.hpp"
#include "pool.hpp"

namespace dslide {

// K codes a table, L tables; a table's codes are joined into one bucket index.
class HashFamily {
 public:
  virtual ~HashFamily() = default;
  // codes[t * stride + i] = bucket of row i in table t, for rows x [count, dim].
  virtual void hash(Pool& pool, const float* x, std::size_t count, std::uint32_t* codes, std::size_t stride) const = 0;
  virtual std::uint32_t buckets() const = 0;
  virtual int tables() const = 0;
};

// Sign of sparse random projections (Charikar 2002; a third of the coordinates, signs +-1, as in the published SLIDE
// code): K bits a table.
std::unique_ptr<HashFamily> make_simhash(std::int64_t dim, int k, int l, std::uint64_t seed);

// Densified winner-take-all (Chen & Shrivastava 2018): the position of the largest of 8 coordinates of a random
// permutation; zeros count as missing, and a bin without values borrows from another. `published` packs a code's three
// bits with a stride of two, as the published SLIDE code does, so that buckets overlap.
std::unique_ptr<HashFamily> make_dwta(std::int64_t dim, int k, int l, std::uint64_t seed, bool published);

}  // namespace dslide
