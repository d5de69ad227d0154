// Approximate prediction: only the rows that share most buckets with a point are scored.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hashing.hpp"
#include "output_layer.hpp"
#include "tables.hpp"

namespace dslide {

// Hash tables over a trained layer's rows for maximum inner product search. What is hashed is the row less the mean row,
// with the bias as one more coordinate: the mean adds the same to all of a point's scores, so it can't change their order,
// but it would draw every row into the same buckets.
class ApproximateTopK {
 public:
  struct Config {
    HashConfig hash;
    std::int64_t candidates = 1000;  // rows that are scored
    std::uint64_t seed = 0;
  };
  // The layer must outlive this and keep its weights.
  ApproximateTopK(OutputLayer& layer, const Config& config);

  // As OutputLayer::topk among the `candidates` rows that are in the most of a point's L buckets (equal ones by lower id);
  // so is the log-sum-exp. Places that remain empty are -1 and -inf. Several threads may call it at once.
  void topk(const float* h, std::size_t points, int k, std::int32_t* ids, float* scores, double* lse) const;

  const OutputLayer& layer() const { return layer_; }

 private:
  OutputLayer& layer_;
  Config config_;
  std::unique_ptr<HashFamily> family_;
  HashTables tables_;
};

}  // namespace dslide
