// Hash tables over a shard's neurons, and the sampler that asks them (SLIDE, Chen et al. 2020, sections 3-4).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hashing.hpp"
#include "output_layer.hpp"
#include "samplers.hpp"

namespace dslide {

// L tables of buckets as counting-sorted arrays: compact, and rebuilt in parallel in one pass.
class HashTables {
 public:
  // codes [tables, count], bucket ids below `buckets`; ids in a bucket ascend.
  void build(Pool& pool, const std::uint32_t* codes, std::size_t count, int tables, std::uint32_t buckets);

  // The last `cap` ids of a bucket (what a first-in-first-out bucket of that size would hold).
  std::pair<const std::int32_t*, const std::int32_t*> bucket(int table, std::uint32_t code, std::int64_t cap) const {
    const std::int32_t* offsets = offsets_.data() + static_cast<std::size_t>(table) * (buckets_ + std::size_t{1});
    const std::int32_t* ids = ids_.data() + static_cast<std::size_t>(table) * count_;
    const std::int32_t end = offsets[code + 1];
    return {ids + std::max<std::int64_t>(offsets[code], end - cap), ids + end};
  }

 private:
  std::size_t count_ = 0, buckets_ = 0;
  std::vector<std::int32_t> offsets_, ids_;
};

// A point's own labels plus the union of its L buckets; if that leaves fewer than `min_active` rows, uniform rows are
// added until there are `top_up`. Caps and top-up are those of the shard.
class LshSampler : public Sampler {
 public:
  struct Config {
    bool dwta = false, published_packing = false;
    int k = 9, l = 50;
    std::int64_t bucket_cap = 128, min_active = 0, top_up = 0;
    std::uint64_t seed = 0;
  };
  LshSampler(OutputLayer& layer, const Config& config);

  void select(const Batch& batch, const float* h, ActiveSet& active) override;
  void rebuild();                         // hashes every neuron of the shard again
  void new_functions(std::uint64_t seed);  // draws hash functions; rebuild() must follow

 private:
  OutputLayer& layer_;
  Config config_;
  std::unique_ptr<HashFamily> family_;
  HashTables tables_;
  std::vector<std::uint32_t> codes_, query_codes_;
  std::vector<std::vector<std::int32_t>> lists_;  // by point
  std::vector<std::vector<std::uint32_t>> seen_;  // by thread: the last point (+ 1) that took a row
  std::vector<std::int64_t> counts_;
};

}  // namespace dslide
