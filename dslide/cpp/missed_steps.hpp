// Adam's steps that a row without a gradient would have made, all of them at once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dslide {

// Dense Adam goes on moving a row that gets no gradient. If m and v are as the row's last own step left them, its k-th
// missed step, of size a_k (bias correction and schedule included), moves a weight by
//
//   a_k b1^k m / (b2^(k/2) s + eps),  s = sqrt(v).
//
// With D = s + eps, u = s / D < 1 and q_k = 1 - b2^(k/2) the denominator is D (1 - u q_k), so the sum over K missed steps is
//
//   m / D  sum_n u^n A_n,  A_n = sum_(k <= K) a_k b1^k q_k^n:
//
// a polynomial in u whose coefficients are the same for all rows that were last moved in the same step. Cut after N terms,
// step k is off by the factor (u q_k)^N. b1^k has vanished before q_k grows: N is the smallest number for which the sum's
// relative error stays below 2^-26 (4 for b1 = 0.9, b2 = 0.999), so that the result is dense Adam's up to the rounding of
// floats, for any number of missed steps and any eps, at the price of one root and one division a weight.
class MissedSteps {
 public:
  // Throws std::invalid_argument unless 0 <= beta1 <= beta2^5: else too many terms would be needed.
  void reset(float beta1, float beta2);

  // Forgets all steps: every row counts as up to date.
  void clear();

  // Steps since the last clear().
  std::uint32_t now() const { return now_; }

  // A step of this size was made by those rows that had a gradient.
  void advance(float step_size);

  struct Since {
    const float* terms;  // A_0 .. A_(N - 1)
    const float* decay;  // b1^K, b2^K
  };
  // What a row has missed that made its last own step as the `step`-th; step <= now(). 0: none since clear(). Where its
  // weights have moved already the terms are zeros.
  Since since(std::uint32_t step, bool weights_there = false) const {
    return {terms_.data() + std::size_t{weights_there ? now_ : step} * static_cast<std::size_t>(count_), decay(now_ - step)};
  }
  const float* decay(std::uint32_t missed) const { return decays_[missed].data(); }
  int count() const { return count_; }  // N

 private:
  double beta1_ = 0.0, beta2_ = 0.0;
  int count_ = 0;
  std::uint32_t now_ = 0;
  std::vector<double> factors_;          // [window, N]: b1^k q_k^n, k from 1; beyond the window b1^k < 1e-12
  std::vector<double> sums_;             // [now + 1, N]: A_n for the rows whose last own step was the i-th
  std::vector<float> terms_;             // the same, rounded
  std::vector<std::array<float, 2>> decays_;  // [now + 1]: powers of b1 and b2
};

}  // namespace dslide
