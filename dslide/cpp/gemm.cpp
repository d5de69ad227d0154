#include "gemm.hpp"

#include <algorithm>

namespace dslide {

std::ptrdiff_t PackedMatrix::padded() const {
  const std::ptrdiff_t nr = kernels().nr;
  return (n_ + nr - 1) / nr * nr;
}

void PackedMatrix::resize(std::ptrdiff_t k, std::ptrdiff_t n) {
  k_ = k;
  n_ = n;
  data_.at_least(static_cast<std::size_t>(k * padded()));
}

void PackedMatrix::pack_transposed(std::ptrdiff_t begin, std::ptrdiff_t end, const float* x, std::ptrdiff_t ld) {
  const Kernels& kern = kernels();
  for (std::ptrdiff_t j = begin; j < end; j += kern.nr)
    kern.pack_panel(x + j * ld, ld, std::min<std::ptrdiff_t>(kern.nr, n_ - j), k_, data_.data() + j * k_);
}

void PackedMatrix::multiply(int m, const float* const* a, std::ptrdiff_t a_step, std::ptrdiff_t k_begin,
                            std::ptrdiff_t k_end, float* c, std::ptrdiff_t ldc, bool accumulate) const {
  const Kernels& kern = kernels();
  for (std::ptrdiff_t j = 0; j < n_; j += kern.nr)
    kern.tile(m, k_end - k_begin, a, a_step, data_.data() + (j / kern.nr * k_ + k_begin) * kern.nr, c + j, ldc,
              accumulate);
}

}  // namespace dslide
