// Which output rows a batch touches, and for which points.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dslide {

// Row ids are local to the shard and ascend. A row's *position* is its place in that list.
struct ActiveSet {
  // Shared: every point sees every active row. Otherwise each row has its own list of points.
  bool shared = true;
  bool all = false;                 // shared, and the rows are 0..row_count - 1 (`rows` stays empty)
  std::size_t row_count = 0;
  std::vector<std::int32_t> rows;
  std::vector<float> log_q;         // per position, subtracted from every logit but the point's own; empty: none
  std::vector<std::uint8_t> own_only;  // per position: only its own points see the row; empty: none

  // The shard's (label, point) pairs by position, ascending.
  struct Own {
    std::int32_t position, point;
    bool among(std::size_t begin, std::size_t end) const {  // the points [begin, end)
      return static_cast<std::size_t>(point) >= begin && static_cast<std::size_t>(point) < end;
    }
  };
  std::vector<Own> own;

  // Not shared: the points of position r are pair_points[pair_indptr[r] .. pair_indptr[r + 1]), ascending. Without meaning
  // in a shared set.
  std::vector<std::int64_t> pair_indptr;
  std::vector<std::int32_t> pair_points;

  std::int32_t row(std::size_t position) const { return all ? static_cast<std::int32_t>(position) : rows[position]; }

  void clear() {
    shared = true;
    all = false;
    row_count = 0;
    rows.clear();
    log_q.clear();
    own_only.clear();
    own.clear();
  }
};

}  // namespace dslide
