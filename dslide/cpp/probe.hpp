// What this machine can do with rows of a table: the rates that `dslide bench` computes bounds from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "active_set.hpp"
#include "buffer.hpp"
#include "output_products.hpp"
#include "pool.hpp"
#include "weights.hpp"

namespace dslide {

// A table [rows, width] of float32 in large pages, touched row by row by all threads, each its own part of `ids`, with
// the rows to come on their way from memory.
class RowProbe {
 public:
  RowProbe(Pool& pool, std::int64_t rows, std::int64_t width);

  // Reads and writes every row of `ids` once: row += 0 * vector. No row may occur twice.
  void update(const std::int32_t* ids, std::size_t count);
  // Reads the rows of `ids` for weighted sums of `group` rows each: one multiplication and addition a value.
  void gather(const std::int32_t* ids, std::size_t count, std::size_t group);

 private:
  void check(std::int32_t id) const;

  Pool& pool_;
  std::int64_t rows_, width_;
  Buffer<float> table_, vector_;
  std::vector<Buffer<float>> out_;  // by thread: nothing that is computed may be left out
};

// Passes a number from one of the pool's threads to another and back, `count` times: what it costs that two cores write to
// each other's cache lines. Several times as much where they share no cache.
void pass_to_and_fro(Pool& pool, std::uint32_t count);

// The three products of an output layer whose points all see all its rows, each by itself: weights [rows, hidden],
// activations [points, hidden] and the logits' gradient [rows, points], the logits being as good as any. To be called in
// this order the first time.
class ProductProbe {
 public:
  ProductProbe(Pool& pool, std::int64_t rows, std::int64_t hidden, std::int64_t points, bool half);

  void logits();
  void hidden_gradient();
  void weight_gradient();

 private:
  OutputProducts::Gradient gradient();

  Pool& pool_;
  std::size_t points_, ld_ = 0;
  ActiveSet active_;
  WeightTable weights_;
  OutputProducts products_;
  Buffer<float> h_, dh_;              // [points, hidden]
  Buffer<float> logits_;              // [rows, ld]
  std::vector<Buffer<float>> tiles_;  // by thread: of the weights' gradient
};

}  // namespace dslide
