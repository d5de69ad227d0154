// Hidden activations -> this shard's labels: sampled softmax, its gradients and updates.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "active_set.hpp"
#include "batch.hpp"
#include "buffer.hpp"
#include "input_layer.hpp"
#include "optimizer.hpp"
#include "output_products.hpp"
#include "philox.hpp"
#include "pool.hpp"
#include "samplers.hpp"
#include "weights.hpp"

namespace dslide {

struct OutputConfig {
  Shard shard;
  std::int64_t hidden = 0;
  bool bias = false;
  float init_std = 0.01f;
  std::uint64_t seed = 0;
  bool half = false;  // weights in bfloat16; hidden must be even
};

// Rows are processed neuron-major: each active row is read once forward and once backward, by one thread, in an order
// that doesn't depend on the number of threads.
class OutputLayer {
 public:
  OutputLayer(Pool& pool, const OutputConfig& config);

  void set_optimizer(const Optimizer& optimizer);

  // Each row becomes the unit-normalised sum over its label's points of (h - mean h), h of a freshly initialised input
  // layer `input` with all hidden units. Every rank computes h itself, a block of units at a time: nothing is communicated.
  // Rows of labels without points keep their normal draws.
  void class_mean_init(const Csr& x, const Csr& y, const InputConfig& input);

  // Where the active rows are shared, forward and backward may take a batch's points [first, last) part by part, in order,
  // `first` a multiple of kPartPoints: the results are the same bits. Otherwise the one part is the batch.
  static constexpr std::size_t kPartPoints = 32;  // whole panels of points in every instruction set

  // Before a batch's first part selects the active rows of all points; then computes logits and lse[p] = log-sum-exp over
  // this shard's rows active for point first + p (-inf if none). h [size, hidden] must be there up to `last`, and all of
  // it for a sampler that asks for it.
  void forward(const Batch& batch, const float* h, Sampler& sampler, std::size_t first, std::size_t last, float* lse);

  // With lse [last - first] over all shards: turns logits into gradients of the mean loss over `global_batch` points and
  // writes this shard's part of the hidden gradient, dh [last - first, hidden]. A point weighs sqrt(its labels) if
  // `weight_labels`, else 1. Returns the shard's part of the points' summed, weighted loss.
  double backward(const Batch& batch, const float* lse, float* dh, bool weight_labels, std::int64_t global_batch,
                  std::size_t first, std::size_t last);

  // The weight gradient and the optimiser's step; `step` counts from 1. Uses h of the last forward. With `may_wait` rows are
  // moved when the next forward reads them, if that is faster: then settle() is needed as below, and the result is the same.
  void update(float lr, std::uint64_t step, bool may_wait = false);

  // The same in pieces, for a rank that waits for another's rows: begin_update(), and then update_some() does some rows and
  // returns true, or false where none is left. What is left is done by the next forward or settle().
  void begin_update(float lr, std::uint64_t step, bool may_wait = false);
  bool update_some();

  // Makes all steps that rows wait for, those that Adam with catch-up has left out, too. Needed before anything but a training
  // step reads weights or state.
  void settle();

  // The k highest logits over the shard: ids (global) and scores [points, k], descending, equal scores by lower id;
  // -1 and -inf where the shard has fewer than k labels. With `lse` [points] also the log-sum-exp over the shard: its
  // float32 parts are of kTopkPart labels each, so that shards cut there add up the same parts. A point's results don't
  // depend on the other points. Several threads may call it at once.
  void topk(const float* h, std::size_t points, int k, std::int32_t* ids, float* scores, double* lse) const;
  static constexpr std::size_t kTopkPart = 1024;

  std::size_t active_rows() const { return active_rows_; }  // of the last forward
  std::int64_t active_pairs() const { return active_pairs_; }
  const OutputConfig& config() const { return config_; }
  Pool& pool() const { return pool_; }
  WeightTable& weights() { return weights_; }
  const WeightTable& weights() const { return weights_; }
  Buffer<float>& bias() { return bias_; }
  RowState& state() { return state_; }
  RowState& bias_state() { return bias_state_; }

 private:
  Rounding rounding() const { return {Philox(config_.seed, Purpose::kOutputRounding).seed(), config_.shard.begin, 0}; }
  std::size_t tile_rows() const;  // rows that are reduced together; depends on the number of active rows alone
  std::pair<std::size_t, std::size_t> own_range(std::size_t begin, std::size_t end) const;
  void update_row(std::int32_t row, const float* g, float bias_gradient, const WeightTable::Step& step);
  void update_inactive(const WeightTable::Step& step);
  void catch_up_row(std::int32_t row);

  void check_part(std::size_t first, std::size_t last) const;
  // Of points [first, last), whose log-sum-exp is `lse` [last - first].
  void forward_shared(std::size_t first, std::size_t last, float* lse);
  double loss_shared(const float* lse, std::size_t first, std::size_t last);  // also makes what gradient_shared needs
  // Turns the logits of positions [t0, t1), a tile, into exponentials.
  void exponentials_shared(std::size_t t0, std::size_t t1, std::size_t p0, std::size_t p1);
  OutputProducts::Gradient gradient_shared();  // in the place of the exponentials
  void update_shared(const WeightTable::Step& step, std::size_t first, std::size_t last);  // rows at positions [first, last)
  void update_rest(std::size_t most);  // at most so many rows of what was begun

  class RowWalk;
  void for_parts(const ActiveSet& active, const std::function<void(int, std::size_t, std::size_t)>& body);  // (part, first, last + 1)
  template <class Meet>
  void walk_part(const ActiveSet& active, int part, std::size_t begin, std::size_t end, Meet meet);
  void update_waiting(std::int32_t row, std::size_t position, float* g);
  void update_all_waiting();
  // What there is one number of, of a row that may lie behind the last.
  __attribute__((always_inline)) void prefetch_single(std::int32_t row) const {
    if (row >= config_.shard.size()) return;
    state_.prefetch_step(row);
    if (!config_.bias) return;
    __builtin_prefetch(bias_.data() + row, 1);
    bias_state_.prefetch_step(row);
    bias_state_.prefetch(row);
  }
  // The row at a position below `end`.
  __attribute__((always_inline)) void prefetch_weights(std::size_t position, std::size_t end) const {
    if (position < end) weights_.prefetch(active_.row(position));
  }
  void forward_pairs(const float* h, std::size_t points, float* lse);
  double backward_pairs(const float* lse, std::size_t points, float* dh);  // the summed loss over the global batch
  void wait_pairs(const WeightTable::Step& step);

  Pool& pool_;
  OutputConfig config_;
  WeightTable weights_;
  Buffer<float> bias_;
  RowState state_, bias_state_;

  ActiveSet active_;
  std::size_t active_rows_ = 0;
  std::int64_t active_pairs_ = 0;
  const float* h_ = nullptr;   // of the last forward: must live until update
  std::size_t points_ = 0, forwarded_ = 0;  // of the batch, and so far
  std::ptrdiff_t ld_ = 0;      // row stride of the shared logits
  // Shared: [active rows, ld_], as exponentials after forward. Pairs: [pairs], as gradients after backward.
  Buffer<float> logits_;
  std::vector<float> own_logits_;  // of active_.own
  Buffer<float> part_max_, part_sum_, scale_, target_;
  Buffer<float> part_rows_;        // pairs: of each part of the rows, rows weighted by exponentials [points, hidden]
  std::vector<std::int64_t> own_pairs_;  // pairs: places of active_.own
  Buffer<float> own_rows_;               // and its rows' weights
  struct Begun {  // shared: an update that has got to the row at this position
    std::optional<WeightTable::Step> step;  // none: no update
    std::size_t position = 0;
  } begun_;
  struct Waiting {  // pairs: a batch whose rows wait for their update
    std::optional<WeightTable::Step> step;  // none: nothing waits
    ActiveSet active;
    Buffer<float> gradients, h;  // of `active`'s pairs; of the points
  } waiting_;
  OutputProducts products_;
  std::vector<Buffer<float>> scratch_;
};

}  // namespace dslide
