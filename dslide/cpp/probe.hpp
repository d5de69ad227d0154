// What this machine can do with rows of a table: the rates that `dslide bench` computes bounds from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "buffer.hpp"
#include "pool.hpp"

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

}  // namespace dslide
