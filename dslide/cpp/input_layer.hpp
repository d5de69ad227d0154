// Sparse input -> this shard's hidden units.
#pragma once

#include <cstdint>
#include <vector>

#include "batch.hpp"
#include "buffer.hpp"
#include "optimizer.hpp"
#include "philox.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace dslide {

struct InputConfig {
  std::int64_t features = 0;
  std::int64_t hidden_total = 0, hidden_begin = 0, hidden_end = 0;
  float slope = 0.0f;  // of the negative side: 0 is ReLU
  float dropout = 0.0f;
  float init_std = 0.05f;
  bool bias = false;
  std::uint64_t seed = 0;
  std::int64_t state_block = 16;
  bool half = false;  // weights in bfloat16
};

class InputLayer {
 public:
  InputLayer(Pool& pool, const InputConfig& config);

  void set_optimizer(const Optimizer& optimizer);

  // out[p] = dropout(act(x_p W + b)) for the batch's points [first, last), out [size, width]; dropout only if `train`. A
  // batch may come in parts, in order. Of two batches that are between forward and backward one has `lane` 0, one 1.
  void forward(const Batch& batch, float* out, bool train, std::size_t first, std::size_t last, std::size_t lane = 0);

  // Applies the derivative of the lane's last train forward to the points [first, last) of dh [size, width] (changed in
  // place), and updates the rows of the features that no later point has, each with its whole gradient: a batch may come
  // in parts, in order, of which the last makes the step complete. `step` counts from 1.
  void backward(const Batch& batch, float* dh, float lr, std::uint64_t step, std::size_t first, std::size_t last,
                std::size_t lane = 0);

  // Adam with catch-up: makes all missed steps. Needed before anything but a training step reads weights or state.
  void settle();

  std::int64_t width() const { return config_.hidden_end - config_.hidden_begin; }
  std::ptrdiff_t ld() const { return ld_; }
  const InputConfig& config() const { return config_; }
  WeightTable& weights() { return weights_; }
  Buffer<float>& bias() { return bias_; }
  RowState& state() { return state_; }
  RowState& bias_state() { return bias_state_; }

 private:
  Rounding rounding() const { return {Philox(config_.seed, Purpose::kInputRounding).seed(), 0, config_.hidden_begin}; }

  Pool& pool_;
  InputConfig config_;
  std::ptrdiff_t ld_;
  WeightTable weights_;
  Buffer<float> bias_;
  RowState state_, bias_state_;
  Buffer<float> derivative_[2];  // act' and dropout factor of the last train forward, by lane: [size, width]
  std::vector<Buffer<float>> scratch_;
  Buffer<float> second_;  // the second share's sums in training [points, width]
};

}  // namespace dslide
