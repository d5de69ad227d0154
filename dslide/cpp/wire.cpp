#include "wire.hpp"

#include <cstring>
#include <stdexcept>

#include "kernels.hpp"

namespace dslide {
namespace {

std::uint16_t to_bf16(float x) {  // to the nearest, ties to even
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>(bits >> 16 | 0x40u);  // stay a NaN
  return static_cast<std::uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

float from_bf16(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace

Wire wire_from_name(const std::string& name) {
  if (name == "fp32") return Wire::kFp32;
  if (name == "bf16") return Wire::kBf16;
  if (name == "int8") return Wire::kInt8;
  throw std::invalid_argument("unknown wire format '" + name + "'; choose fp32, bf16 or int8");
}

std::size_t row_bytes(Wire wire, std::size_t n) {
  switch (wire) {
    case Wire::kFp32: return 4 * n;
    case Wire::kBf16: return 2 * n;
    default: return n + 4;
  }
}

void pack_rows(const float* x, std::size_t rows, std::size_t ld, std::size_t begin, std::size_t end, Wire wire,
               std::uint8_t* out) {
  const std::size_t n = end - begin;
  for (std::size_t r = 0; r < rows; ++r) {
    const float* source = x + r * ld + begin;
    if (wire == Wire::kFp32) {
      std::memcpy(out + r * n * 4, source, n * 4);
    } else if (wire == Wire::kBf16) {
      for (std::size_t i = 0; i < n; ++i) {
        const std::uint16_t half = to_bf16(source[i]);
        std::memcpy(out + (r * n + i) * 2, &half, 2);
      }
    } else {
      const float scale = kernels().quantise(source, static_cast<std::ptrdiff_t>(n), reinterpret_cast<std::int8_t*>(out + r * n));
      std::memcpy(out + rows * n + r * 4, &scale, 4);
    }
  }
}

void unpack_rows(const std::uint8_t* in, std::size_t rows, std::size_t ld, std::size_t begin, std::size_t end, Wire wire,
                 float* x, bool add) {
  const std::size_t n = end - begin;
  for (std::size_t r = 0; r < rows; ++r) {
    float* target = x + r * ld + begin;
    if (wire == Wire::kInt8) {
      float scale;
      std::memcpy(&scale, in + rows * n + r * 4, 4);
      kernels().dequantise(reinterpret_cast<const std::int8_t*>(in + r * n), scale, static_cast<std::ptrdiff_t>(n), target, add);
    } else {
      for (std::size_t i = 0; i < n; ++i) {
        float value;
        if (wire == Wire::kFp32) {
          std::memcpy(&value, in + (r * n + i) * 4, 4);
        } else {
          std::uint16_t half;
          std::memcpy(&half, in + (r * n + i) * 2, 2);
          value = from_bf16(half);
        }
        target[i] = add ? target[i] + value : value;
      }
    }
  }
}

}  // namespace dslide
