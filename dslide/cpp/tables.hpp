// Hash tables over a shard's neurons, and the sampler that asks them (SLIDE, Chen et al. 2020, sections 3-4).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.hpp"
#include "hashing.hpp"
#include "output_layer.hpp"
#include "samplers.hpp"

namespace dslide {

// L tables of buckets as counting-sorted arrays: compact, and rebuilt in parallel in one pass.
class HashTables {
 public:
  // Which `cap` ids a bucket keeps of those that fall into it, inserted in ascending order.
  enum class Policy {
    kFifo,       // the last
    kReservoir,  // a uniform sample (algorithm R, Vitter 1985)
  };

  // codes [tables, count], bucket ids below `buckets`. `seed` and `draw` key the reservoir's draws.
  void build(Pool& pool, const std::uint32_t* codes, std::size_t count, int tables, std::uint32_t buckets,
             std::int64_t cap, Policy policy, std::uint64_t seed, std::uint64_t draw);

  // The ids that a bucket keeps; fifo: ascending.
  std::pair<const std::int32_t*, const std::int32_t*> bucket(int table, std::uint32_t code) const {
    const std::int32_t* offsets = offsets_.data() + static_cast<std::size_t>(table) * (buckets_ + std::size_t{1});
    const std::int32_t* ids = ids_.data() + static_cast<std::size_t>(table) * count_;
    const std::int64_t begin = offsets[code], end = offsets[code + 1];
    if (policy_ == Policy::kReservoir) return {ids + begin, ids + std::min(end, begin + cap_)};
    return {ids + std::max(begin, end - cap_), ids + end};
  }

 private:
  std::size_t count_ = 0, buckets_ = 0;
  std::int64_t cap_ = 0;
  Policy policy_ = Policy::kFifo;
  Buffer<std::int32_t> offsets_, ids_;
};

// The tables' answer for every point: which of the ids in its L buckets become active. A point's own labels always are,
// and don't count here. As a sampler, each point sees its own answer; as a proposer (samplers.hpp), all points see the
// union. Where a sampler's own labels and answer are fewer than `min_active` rows, uniform rows are added until there are
// `top_up`. Caps, counts and top-up are those of the shard.
class LshSampler : public Sampler, public Proposer {
 public:
  enum class Selection {
    kUnion,      // all of them
    kVanilla,    // those of tables in random order, until there are `beta`
    kTopK,       // the `beta` that are in the most buckets, equal ones by lower id
    kThreshold,  // those in at least `min_hits` buckets
  };
  struct Config {
    HashConfig hash;
    HashTables::Policy policy = HashTables::Policy::kFifo;
    std::int64_t bucket_cap = 128;
    Selection selection = Selection::kUnion;
    std::int64_t beta = 1000, min_hits = 2, min_active = 0, top_up = 0;
    std::uint64_t seed = 0;
  };
  LshSampler(OutputLayer& layer, const Config& config);

  void select(const Batch& batch, const float* h, ActiveSet& active) override;
  void propose(const Batch& batch, const float* h, std::vector<std::int32_t>& rows) override;
  void rebuild(std::uint64_t draw = 0);    // hashes every neuron of the shard again; `draw` keys the reservoir
  void new_functions(std::uint64_t seed);  // draws hash functions; rebuild() must follow

 private:
  struct Scratch {  // of a thread
    std::vector<std::uint8_t> seen;  // by row: the mark of the last point that took it
    std::vector<std::uint16_t> hits;  // by row: buckets of the current point that hold it
    std::vector<std::int32_t> found;
    std::vector<int> order;  // of tables
    std::vector<std::pair<const std::int32_t*, const std::int32_t*>> buckets;  // of the current point
    // While lists are inverted: places of the next pairs of its points, by block; the rows of its blocks that have pairs, and
    // where these begin.
    std::vector<std::int64_t> cursor, row_begin;
    std::vector<std::int32_t> rows;
  };
  void query(const Batch& batch, const float* h, bool own_labels);
  void answer(const Batch& batch, std::size_t point, std::uint8_t mark, Scratch& scratch, std::vector<std::int32_t>& list) const;
  void hash_rows();
  void invert(std::size_t points, ActiveSet& active);

  OutputLayer& layer_;
  Config config_;
  std::unique_ptr<HashFamily> family_;
  HashTables tables_;
  Buffer<std::uint32_t> codes_;
  std::vector<std::uint32_t> query_codes_;
  std::vector<std::vector<std::int32_t>> lists_;  // by point
  std::vector<Scratch> scratch_;
  struct Pair {
    std::uint32_t row;  // of its block
    std::int32_t point;
  };
  std::vector<Pair> pairs_;                // by block
  std::vector<std::int64_t> block_begin_;  // among them
};

}  // namespace dslide
