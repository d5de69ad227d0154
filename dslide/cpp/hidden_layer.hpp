// Hidden activations -> this shard's units of the next hidden layer; all of them, or those that a sampler chooses.
#pragma once

#include <cstdint>
#include <vector>

#include "active_set.hpp"
#include "batch.hpp"
#include "buffer.hpp"
#include "gemm.hpp"
#include "output_layer.hpp"
#include "samplers.hpp"

namespace dslide {

struct HiddenConfig {
  float slope = 0.0f;    // of the negative side: 0 is ReLU
  float dropout = 0.0f;  // where no sampler chooses
  float scale = 1.0f;    // of sampled activations in training: one over the probability that a unit is chosen
  std::uint64_t seed = 0;
};

// What a hidden layer computes, over neurons that an OutputLayer keeps: their weights, biases, optimiser state and cut
// into shards are those of any rows, and every sampler of rows works on them. They have no labels, so that the batch
// that a sampler sees must have none.
class HiddenLayer {
 public:
  // The shard must begin at a multiple of 8 units, since dropout draws eight together. `rows` must outlive the layer.
  HiddenLayer(OutputLayer& rows, const HiddenConfig& config);

  // out[p] = act(W in_p + b) of all units, [points, width]; in [points, inputs]. Keeps nothing: several threads may call it.
  void predict(const float* in, std::size_t points, float* out) const;

  // The same in training, with dropout; or with a `sampler` of its choice of units, scaled, and zeros for the others.
  // `in` must stay unchanged until update().
  void forward(const Batch& batch, const float* in, Sampler* sampler, float* out);

  // From the gradient of the last forward's `out` [points, width] this shard's part of that of its `in` [points, inputs].
  void backward(const float* dout, float* din);

  // The weight gradient and the optimiser's step; `step` counts from 1.
  void update(float lr, std::uint64_t step);

  std::size_t points() const { return points_; }  // of the last forward
  std::int64_t width() const { return rows_.config().shard.size(); }
  std::int64_t inputs() const { return rows_.config().hidden; }
  // Pairs of a point and an active unit in the last forward.
  std::int64_t active_pairs() const;
  // The last forward's active units: all; the same for all points, active().rows; or those of point p,
  // point_units()[point_indptr()[p] .. point_indptr()[p + 1]), ascending.
  const ActiveSet& active() const { return active_; }
  const std::vector<std::int64_t>& point_indptr() const { return point_indptr_; }
  const std::vector<std::int32_t>& point_units() const { return point_units_; }

 private:
  void multiply(const float* in, std::size_t points, const PackedMatrix& weights, float* out) const;
  void pack_weights(PackedMatrix& packed) const;
  void list_by_point();
  void forward_all(const Batch& batch, const float* in, float* out);
  void forward_sampled(const float* in, float* out);
  void update_all(float step_size);
  void update_sampled(float step_size);
  void update_row(std::int64_t row, const float* gradient, float bias_gradient, float step_size);

  OutputLayer& rows_;
  HiddenConfig config_;
  ActiveSet active_;
  const float* in_ = nullptr;
  std::size_t points_ = 0;
  // All: [points, width]. Sampled: by pair, in the order of point_units_.
  Buffer<float> derivative_, delta_;
  std::vector<std::int64_t> point_indptr_;
  std::vector<std::int32_t> point_units_;
  std::vector<std::int64_t> pair_place_;  // of the active set's pairs, which are in the order of rows, in point_units_
  PackedMatrix packed_;
};

}  // namespace dslide
