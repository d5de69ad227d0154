// The parser of the XC text format: "l1,l2,... f:v f:v ...", one line a point. Knows neither Python nor files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pool.hpp"

namespace dslide {

struct XcLimits {
  std::int64_t features;      // ids must lie below, after the base is taken off
  std::int64_t labels;        // kNoLabels: a matrix of features alone, in which a label is an error
  std::int64_t feature_base;  // 0 or 1
  std::int64_t label_base;
  bool comments = false;      // '#' ends a line, as in LIBSVM's files
  bool lenient = false;       // leave bad lines out and count them
};
constexpr std::int64_t kNoLabels = -1;

// A line that isn't in the format.
struct XcError : std::runtime_error {
  enum class Kind { kSyntax, kFeatureOutside, kLabelOutside };
  XcError(std::int64_t line_, std::int64_t column_, Kind kind_, const std::string& reason)
      : std::runtime_error(reason), line(line_), column(column_), kind(kind_) {}
  std::int64_t line;    // from 0, within the text
  std::int64_t column;  // from 1, in bytes: where the offending word begins
  Kind kind;
};

// A number of points as CSR parts: ids from 0, ascending and unique within a point.
struct XcPoints {
  std::vector<std::int64_t> x_lengths;  // [points] features of each point
  std::vector<std::int32_t> x_indices;
  std::vector<float> x_values;
  std::vector<std::int64_t> y_lengths;  // [points] labels of each point
  std::vector<std::int32_t> y_indices;
  std::int64_t unsorted = 0;      // points whose features or labels had to be sorted
  std::int64_t duplicates = 0;    // features added to an equal one before, labels that occurred before
  std::int64_t blank_tail = 0;    // lines at the end without a single character
  std::int64_t lines = 0;         // points and skipped lines
  std::int64_t skipped = 0;       // lenient: lines left out
  std::optional<XcError> first_skipped;
};

// Parses complete lines (a last one may lack its newline). What is accepted beyond the plain format: "\r\n",
// tabs and repeated spaces, spaces after the commas between labels, no labels (the line begins with a space
// or with a feature), no features, labels written as whole floats ("12.0"), unsorted ids (sorted), repeated
// features (values added), repeated labels (kept once), values that float32 rounds to 0. Everything else
// throws XcError for the first bad line, or with `lenient` leaves the line out. Returns a part of the points for
// each thread, in the order of the text.
std::vector<XcPoints> parse_xc(Pool& pool, std::string_view text, const XcLimits& limits);

}  // namespace dslide
