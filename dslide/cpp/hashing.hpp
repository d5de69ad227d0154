// Hash families over dense vectors: SimHash, winner-take-all with and without densification, and min-hash (DOPH).
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

struct HashConfig {
  enum class Family {
    // Sign of a random projection (Charikar 2002), one bit a code.
    kSimHash,
    // Position of the largest of 8 coordinates of a random permutation, three bits a code. A permutation is cut into
    // bins of 8, and a bin without values borrows from another (densified winner-take-all, Chen & Shrivastava 2018).
    kDwta,
    // The same position, but every code has a permutation of its own and nothing is borrowed (Yagnik et al. 2011).
    kWta,
    // Min-hash of the set of the largest quarter of the coordinates by densified one-permutation hashing (Shrivastava &
    // Li 2014), cut to three bits a code (Li & Koenig 2010).
    kDoph,
  };
  Family family = Family::kSimHash;
  int k = 9, l = 50;
  // SimHash: normal projections on every coordinate; otherwise +-1 on a random third, as in the published SLIDE code.
  bool dense_projections = false;
  // DWTA, WTA: a coordinate that is zero competes with the value 0; otherwise it is missing.
  bool zeros_are_values = false;
  // DWTA, WTA: a code's three bits with a stride of two, as the published SLIDE code packs them, so that buckets overlap.
  bool published_packing = false;
};

HashConfig::Family hash_family_from_name(const std::string& name);

// Functions over vectors of `dim` coordinates, drawn with `seed`.
std::unique_ptr<HashFamily> make_hash_family(std::int64_t dim, const HashConfig& config, std::uint64_t seed);

}  // namespace dslide
