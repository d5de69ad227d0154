// How rows of floats travel between ranks: float32, bfloat16, or int8 with one float32 scale a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dslide {

enum class Wire { kFp32, kBf16, kInt8 };

Wire wire_from_name(const std::string& name);  // "fp32", "bf16", "int8"; throws otherwise

// Bytes of one row of n values.
std::size_t row_bytes(Wire wire, std::size_t n);

// Columns [begin, end) of x [rows, ld] into out [rows * row_bytes]: all values first, then (int8) the scales.
void pack_rows(const float* x, std::size_t rows, std::size_t ld, std::size_t begin, std::size_t end, Wire wire,
               std::uint8_t* out);

// The reverse, into columns [begin, end) of x; added to what is there if `add`.
void unpack_rows(const std::uint8_t* in, std::size_t rows, std::size_t ld, std::size_t begin, std::size_t end, Wire wire,
                 float* x, bool add);

}  // namespace dslide
