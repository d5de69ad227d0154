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

// Rows that all points of a batch should see, found from their activations.
class Proposer {
 public:
  virtual ~Proposer() = default;
  // Appends rows of the shard in any order, possibly more than once.
  virtual void propose(const Batch& batch, const float* h, std::vector<std::int32_t>& rows) = 0;
};

// A set that all points share: the union of the batch's labels, `extras` draws over the labels and `log_uniform` draws
// over their ranks by frequency (both with replacement), and what a proposer proposes.
//
// Log-Q correction: row l is active for a point that doesn't own it with probability
// q_l = 1 - (1 - f_l / N)^(B - 1) (1 - 1 / L)^S (1 - p_l)^T for f_l of N points with label l, global batch B, S uniform
// draws over L labels, T log-uniform ones with p_l = log(1 + 1 / (rank_l + 1)) / log(L + 1). A proposed row would be
// there whatever was drawn: its q is 1. With `own_only` other points' labels don't count as negatives, so that only draws
// and proposals do.
class InBatchSampler : public Sampler {
 public:
  struct Config {
    std::int64_t num_points = 0, batch_size = 0, extras = 0, log_uniform = 0;
    bool log_q = true, own_only = false;
    std::uint64_t seed = 0;
  };
  // counts [labels_total]: points with each label. `proposer` may be null; it must outlive the sampler.
  InBatchSampler(const Shard& shard, const Config& config, const std::int64_t* counts, Proposer* proposer = nullptr);
  void select(const Batch& batch, const float* h, ActiveSet& active) override;

 private:
  void draw_uniform(std::uint64_t step);
  void draw_log_uniform(std::uint64_t step);

  Shard shard_;
  Config config_;
  Proposer* proposer_;
  std::vector<float> log_q_;           // [shard]
  std::vector<std::int32_t> by_rank_;  // [labels_total], where there are log-uniform draws: the most frequent label first
  std::vector<std::int32_t> drawn_, proposed_, sorted_;
};

}  // namespace dslide
