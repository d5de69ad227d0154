#include "gemm.hpp"

#include <algorithm>
#include <cstring>

namespace dslide {

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

void PackedPairs::resize(std::ptrdiff_t k, std::ptrdiff_t n) {
  k_ = k;
  n_ = n;
  data_.at_least(static_cast<std::size_t>(depth() * whole_panels(n_)));
}

void PackedPairs::pack_transposed(std::ptrdiff_t begin, std::ptrdiff_t end, const std::uint16_t* x, std::ptrdiff_t ld) {
  const std::ptrdiff_t nr = kernels().nr;
  constexpr std::ptrdiff_t kBlock = 32;  // one cache line of each source row at a time
  for (std::ptrdiff_t j = begin; j < end; j += nr) {
    std::uint16_t* target = panel(j);
    const std::ptrdiff_t size = std::min(nr, n_ - j);
    for (std::ptrdiff_t k0 = 0; k0 < k_; k0 += kBlock) {
      const std::ptrdiff_t k1 = std::min(k_, k0 + kBlock);
      for (std::ptrdiff_t c = 0; c < nr; ++c)
        for (std::ptrdiff_t k = k0; k < k1; k += 2) {
          std::uint16_t pair[2] = {0, 0};
          if (c < size) std::memcpy(pair, x + (j + c) * ld + k, 4);
          std::memcpy(target + k * nr + 2 * c, pair, 4);
        }
    }
  }
}

void PackedPairs::multiply(int m, const std::uint16_t* const* a, std::ptrdiff_t a_step, std::ptrdiff_t k_begin,
                           std::ptrdiff_t k_end, float* c, std::ptrdiff_t ldc, bool accumulate) const {
  const Kernels& kern = kernels();
  for (std::ptrdiff_t j = 0; j < n_; j += kern.nr)
    kern.tile_pairs(m, (k_end - k_begin + 1) / 2, a, a_step, data_.data() + j * depth() + k_begin * kern.nr, c + j, ldc,
                    accumulate);
}

}  // namespace dslide
