// Sorting by a small whole number.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dslide {

// Sorts by key(item) >= 0, 32 bits, equal keys in their order: counting sorts of 11 bits each, as many as the largest key
// needs. `spare` is scratch.
template <class Item, class Key>
void radix_sort(std::vector<Item>& items, std::vector<Item>& spare, Key key) {
  constexpr int kBits = 11;
  std::int32_t top = 0;
  for (const Item& item : items) top = std::max(top, key(item));
  spare.resize(items.size());
  for (int shift = 0; shift == 0 || (shift < 32 && top >> shift != 0); shift += kBits) {
    const auto digit = [&](const Item& item) {
      return static_cast<std::size_t>(static_cast<std::uint32_t>(key(item)) >> shift & ((1u << kBits) - 1));
    };
    std::array<std::uint32_t, (1u << kBits) + 1> begin{};
    for (const Item& item : items) ++begin[digit(item) + 1];
    for (std::size_t d = 1; d < begin.size(); ++d) begin[d] += begin[d - 1];
    for (const Item& item : items) spare[begin[digit(item)]++] = item;
    items.swap(spare);
  }
}

}  // namespace dslide
