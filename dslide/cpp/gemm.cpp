#include "gemm.hpp"

#include <algorithm>

namespace dslide {
namespace {

// body(first row, rows, first column) for every tile, all rows of a panel one after another.
template <class Body>
void for_tiles(std::ptrdiff_t m, std::ptrdiff_t n_begin, std::ptrdiff_t n_end, const Ahead* ahead, Body body) {
  const std::ptrdiff_t mr = kernels().mr, nr = kernels().nr;
  const std::ptrdiff_t parts = (m + mr - 1) / mr * ((n_end - n_begin + nr - 1) / nr);
  std::ptrdiff_t part = 0;
  for (std::ptrdiff_t j = n_begin; j < n_end; j += nr)
    for (std::ptrdiff_t i = 0; i < m; i += mr) {
      if (ahead != nullptr) (*ahead)(part++, parts);
      body(i, static_cast<int>(std::min(m - i, mr)), j);
    }
}

}  // namespace

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

void PackedMatrix::multiply(std::ptrdiff_t m, const float* const* a, std::ptrdiff_t a_step, const Part& part, float* c,
                            std::ptrdiff_t ldc, bool accumulate, const Ahead* ahead) const {
  const Kernels& kern = kernels();
  for_tiles(m, part.n_begin, part.n_end, ahead, [&](std::ptrdiff_t i, int rows, std::ptrdiff_t j) {
    kern.tile(rows, part.k_end - part.k_begin, a + i, a_step, data_.data() + j * k_ + part.k_begin * kern.nr,
              c + i * ldc + j - part.n_begin, ldc, accumulate);
  });
}

void PackedPairs::resize(std::ptrdiff_t k, std::ptrdiff_t n) {
  k_ = k;
  n_ = n;
  data_.at_least(static_cast<std::size_t>(depth() * whole_panels(n_)));
}

void PackedPairs::pack_transposed(std::ptrdiff_t begin, std::ptrdiff_t end, const std::uint16_t* x, std::ptrdiff_t ld) {
  const Kernels& kern = kernels();
  for (std::ptrdiff_t j = begin; j < end; j += kern.nr)
    kern.pack_panel(x + j * ld, ld / 2, std::min<std::ptrdiff_t>(kern.nr, n_ - j), k_ / 2, panel(j));
}

void PackedPairs::multiply(std::ptrdiff_t m, const std::uint16_t* const* a, std::ptrdiff_t a_step,
                           const PackedMatrix::Part& part, float* c, std::ptrdiff_t ldc, bool accumulate,
                           const Ahead* ahead) const {
  const Kernels& kern = kernels();
  for_tiles(m, part.n_begin, part.n_end, ahead, [&](std::ptrdiff_t i, int rows, std::ptrdiff_t j) {
    kern.tile_pairs(rows, (part.k_end - part.k_begin + 1) / 2, a + i, a_step,
                    data_.data() + j * depth() + part.k_begin * kern.nr, c + i * ldc + j - part.n_begin, ldc, accumulate);
  });
}

}  // namespace dslide
