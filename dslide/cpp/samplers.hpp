// Samplers: which output neurons a batch touches. One interface, exchangeable parts.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "active_set.hpp"
#include "batch.hpp"
#include "pool.hpp"

namespace dslide {

// The labels [begin, end) that a rank owns.
struct Shard {
  std::int64_t labels_total = 0, begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

class Sampler {
 public:
  virtual ~Sampler() = default;
  // Fills `active` for the batch; h [size, hidden] are the hidden activations.
  virtual void select(const Batch& batch, const float* h, ActiveSet& active) = 0;
};

// Every row of the shard.
class FullSampler : public Sampler {
 public:
  explicit FullSampler(const Shard& shard) : shard_(shard) {}
  void select(const Batch& batch, const float* h, ActiveSet& active) override;

 private:
  Shard shard_;
};

// The union of the batch's labels, plus `extras` uniform draws with replacement; log-Q correction:
// q_l = 1 - (1 - f_l / N)^(B - 1) (1 - 1 / L)^S is the probability that row l is active for a point that doesn't own it
// (f_l points with label l among N, batch B, S draws over L labels). With `own_only` other points' labels don't count as
// negatives, so that only the uniform draws do.
class InBatchSampler : public Sampler {
 public:
  struct Config {
    std::int64_t num_points = 0, batch_size = 0, extras = 0;
    bool log_q = true, own_only = false;
    std::uint64_t seed = 0;
  };
  // counts [labels_total]: points with each label.
  InBatchSampler(const Shard& shard, const Config& config, const std::int64_t* counts);
  void select(const Batch& batch, const float* h, ActiveSet& active) override;

 private:
  Shard shard_;
  Config config_;
  std::vector<float> log_q_;  // [shard]
  std::vector<std::int32_t> drawn_;
};

}  // namespace dslide
