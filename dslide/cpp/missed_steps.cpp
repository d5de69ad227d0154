#include "missed_steps.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace dslide {

void MissedSteps::reset(float beta1, float beta2) {
  constexpr int kMost = 40;
  beta1_ = double{beta1};
  beta2_ = double{beta2};
  if (!(beta1 >= 0.0f) || !(beta1_ <= std::pow(beta2_, 5.0)) || !(beta2 < 1.0f))
    throw std::invalid_argument("adam with catch-up needs beta1 <= beta2^5; take adam, or a beta2 closer to 1");
  std::size_t window = 1;
  for (double p = beta1_; p >= 1e-12; p *= beta1_) ++window;
  const auto missing = [&](std::size_t k) { return 1.0 - std::pow(beta2_, 0.5 * static_cast<double>(k)); };
  double all = 0.0;
  for (std::size_t k = 1; k <= window; ++k) all += std::pow(beta1_, static_cast<double>(k));
  for (count_ = 1; count_ < kMost; ++count_) {
    double rest = 0.0;  // at u = 1, where it is largest
    for (std::size_t k = 1; k <= window; ++k)
      rest += std::pow(beta1_, static_cast<double>(k)) * std::pow(missing(k), count_) / (1.0 - missing(k));
    if (rest <= 0x1p-26 * all) break;
  }
  factors_.clear();
  for (std::size_t k = 1; k <= window; ++k) {
    double factor = std::pow(beta1_, static_cast<double>(k));
    for (int n = 0; n < count_; ++n, factor *= missing(k)) factors_.push_back(factor);
  }
  clear();
}

void MissedSteps::clear() {
  now_ = 0;
  sums_.assign(static_cast<std::size_t>(count_), 0.0);
  terms_.assign(static_cast<std::size_t>(count_), 0.0f);
  decays_.assign(1, {1.0f, 1.0f});
}

void MissedSteps::advance(float step_size) {
  const auto n = static_cast<std::size_t>(count_);
  const std::size_t window = std::min<std::size_t>(std::size_t{now_} + 1, factors_.size() / n);
  for (std::size_t k = 1; k <= window; ++k) {  // for the rows whose last own step was k steps before this one
    const std::size_t at = (now_ + 1 - k) * n;
    for (std::size_t i = 0; i < n; ++i) {
      sums_[at + i] += static_cast<double>(step_size) * factors_[(k - 1) * n + i];
      terms_[at + i] = static_cast<float>(sums_[at + i]);
    }
  }
  ++now_;
  sums_.resize((now_ + 1) * n, 0.0);
  terms_.resize((now_ + 1) * n, 0.0f);
  // Below 2^-100 a power is 0: what it scales then is lost beside any weight, and denormal numbers would be slow.
  const auto power = [&](double base) {
    const double p = std::pow(base, static_cast<double>(now_));
    return p < 0x1p-100 ? 0.0f : static_cast<float>(p);
  };
  decays_.push_back({power(beta1_), power(beta2_)});
}

}  // namespace dslide
