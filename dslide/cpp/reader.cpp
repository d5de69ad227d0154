#include "reader.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>

namespace dslide {
namespace {

struct Feature {
  std::int32_t id;
  float value;
};

bool is_space(char c) { return c == ' ' || c == '\t'; }

// One part of the text: the points up to its end or up to its first bad line.
class Parser {
 public:
  Parser(std::string_view text, const XcLimits& limits) : text_(text), limits_(limits) {}

  void run() {
    points.x_indices.reserve(text_.size() / 8);  // about what real sets need; costs nothing until it is used
    points.x_values.reserve(text_.size() / 8);
    for (std::size_t begin = 0; begin < text_.size(); ++points.lines) {
      const std::size_t newline = std::min(text_.find('\n', begin), text_.size());
      std::size_t end = newline;
      if (end > begin && text_[end - 1] == '\r') --end;
      if (limits_.comments && is_comment(begin, end)) {
        begin = newline + 1;
        continue;
      }
      try {
        line(text_.data() + begin, text_.data() + end);
        points.blank_tail = end == begin ? points.blank_tail + 1 : 0;
      } catch (const XcError& e) {
        if (!limits_.lenient) {
          error = e;
          return;
        }
        if (points.skipped++ == 0) points.first_skipped = e;
      }
      begin = newline + 1;
    }
  }

  XcPoints points;
  std::optional<XcError> error;

 private:
  using Kind = XcError::Kind;

  [[noreturn]] void fail(const char* where, const std::string& reason, Kind kind = Kind::kSyntax) const {
    throw XcError(points.lines, where - begin_ + 1, kind, reason);
  }

  // The word at `where`, for a message.
  std::string word(const char* where) const {
    const char* end = where;
    while (end < end_ && !is_space(*end) && end - where < 40) ++end;
    std::string shown = "'";
    for (const char* c = where; c < end; ++c) shown += *c >= 0x20 && *c < 0x7f ? *c : '?';
    return shown + "'";
  }

  bool is_comment(std::size_t begin, std::size_t end) const {
    while (begin < end && is_space(text_[begin])) ++begin;
    return begin < end && text_[begin] == '#';
  }

  void skip_spaces() {
    while (at_ < end_ && is_space(*at_)) ++at_;
  }

  void line(const char* begin, const char* end) {
    begin_ = at_ = begin;
    end_ = limits_.comments ? std::find(begin, end, '#') : end;
    features_.clear();
    labels_.clear();
    if (at_ < end_ && !is_space(*at_) && !first_word_is_feature()) {
      if (limits_.labels == kNoLabels) fail(at_, "expected feature:value, found " + word(at_));
      read_labels();
    }
    for (skip_spaces(); at_ < end_; skip_spaces()) read_feature();
    store();
  }

  bool first_word_is_feature() const {
    const char* c = at_;
    while (c < end_ && !is_space(*c) && *c != ',' && *c != ':') ++c;
    return c < end_ && *c == ':';
  }

  void read_labels() {
    while (true) {
      const char* start = at_;
      labels_.push_back(read_label());
      if (at_ == end_ || is_space(*at_)) return;
      if (*at_ == ':') fail(start, "a label was expected after ',', found the feature " + word(start));
      if (*at_ != ',') fail(start, "label " + word(start) + " isn't a number");
      const char* comma = at_++;
      skip_spaces();
      if (at_ == end_) fail(comma, "the labels end with ','");
    }
  }

  std::int32_t read_label() {
    const char* start = at_;
    std::int64_t id = read_integer("label");
    if (at_ < end_ && (*at_ == '.' || *at_ == 'e' || *at_ == 'E')) {  // written as a float
      double value = 0;
      const auto [stop, status] = std::from_chars(start, end_, value);
      if (status != std::errc() || value != std::floor(value)) {
        fail(start, "label " + word(start) + " isn't a whole number");
      }
      at_ = stop;
      id = std::abs(value) < 1e15 ? static_cast<std::int64_t>(value) : std::numeric_limits<std::int64_t>::max();
    }
    return in_range(start, Kind::kLabelOutside, id, limits_.labels, limits_.label_base);
  }

  std::int64_t read_integer(const char* kind) {
    std::int64_t id = 0;
    const auto [stop, status] = std::from_chars(at_, end_, id);
    if (status == std::errc::invalid_argument) fail(at_, std::string(kind) + " " + word(at_) + " isn't a number");
    if (status == std::errc::result_out_of_range) id = *at_ == '-' ? -1 : std::numeric_limits<std::int64_t>::max();
    at_ = stop;
    return id;
  }

  std::int32_t in_range(const char* start, Kind kind, std::int64_t id, std::int64_t limit, std::int64_t first) const {
    if (id < first || id - first >= limit) {
      const std::string what = kind == Kind::kLabelOutside ? "label " : "feature ";
      fail(start, what + word(start) + " lies outside " + std::to_string(first) + ".." + std::to_string(limit - 1 + first),
           kind);
    }
    return static_cast<std::int32_t>(id - first);
  }

  void read_feature() {
    const char* start = at_;
    const std::int64_t id = read_integer("feature");
    if (at_ == end_ || *at_ != ':') fail(start, "expected feature:value, found " + word(start));
    const std::int32_t index = in_range(start, Kind::kFeatureOutside, id, limits_.features, limits_.feature_base);
    ++at_;
    const float value = read_value(start);
    if (at_ < end_ && !is_space(*at_)) fail(start, "the value of " + word(start) + " isn't a number");
    features_.push_back({index, value});
  }

  float read_value(const char* start) {
    if (at_ < end_ && *at_ == '+' && at_ + 1 < end_ && at_[1] != '-') ++at_;
    float value = 0;
    const auto [stop, status] = std::from_chars(at_, end_, value);
    if (status == std::errc::invalid_argument) fail(start, "the value of " + word(start) + " isn't a number");
    if (status == std::errc::result_out_of_range) value = out_of_range(stop);
    if (!std::isfinite(value)) fail(start, "the value of " + word(start) + " isn't finite in float32");
    at_ = stop;
    return value;
  }

  // Too near to 0 or too far from it for float32: what is left of it, or infinity.
  float out_of_range(const char* stop) const {
    double value = 0;
    if (std::from_chars(at_, stop, value).ec == std::errc()) return static_cast<float>(value);
    // Even for float64, so the exponent is huge (or there are hundreds of digits): its sign decides.
    const std::string_view digits(at_, static_cast<std::size_t>(stop - at_));
    const std::size_t exponent = digits.find_first_of("eE");
    const bool tiny = exponent == std::string_view::npos ? digits.find("0.") <= 1 : digits[exponent + 1] == '-';
    return tiny ? 0.0F : std::numeric_limits<float>::infinity();
  }

  void store() {
    const auto by_id = [](const Feature& a, const Feature& b) { return a.id < b.id; };
    const bool sorted =
        std::is_sorted(features_.begin(), features_.end(), by_id) && std::is_sorted(labels_.begin(), labels_.end());
    if (!sorted) {
      std::stable_sort(features_.begin(), features_.end(), by_id);
      std::sort(labels_.begin(), labels_.end());
    }
    std::size_t count = 0;  // distinct features, moved to the front
    for (std::size_t i = 0; i < features_.size(); ++count) {
      double sum = 0;
      const std::size_t first = i;
      for (; i < features_.size() && features_[i].id == features_[first].id; ++i) sum += features_[i].value;
      const float value = static_cast<float>(sum);
      if (!std::isfinite(value)) fail(begin_, "the values of a repeated feature add up to more than float32 holds");
      features_[count] = {features_[first].id, value};
    }
    // Nothing fails from here on: a point is stored whole or not at all.
    points.unsorted += sorted ? 0 : 1;
    points.duplicates += static_cast<std::int64_t>(features_.size() - count);
    for (std::size_t i = 0; i < count; ++i) {
      points.x_indices.push_back(features_[i].id);
      points.x_values.push_back(features_[i].value);
    }
    points.x_lengths.push_back(static_cast<std::int64_t>(count));
    const auto unique_end = std::unique(labels_.begin(), labels_.end());
    points.duplicates += labels_.end() - unique_end;
    points.y_indices.insert(points.y_indices.end(), labels_.begin(), unique_end);
    points.y_lengths.push_back(unique_end - labels_.begin());
  }

  const std::string_view text_;
  const XcLimits& limits_;
  const char* begin_ = nullptr;  // of the line
  const char* at_ = nullptr;
  const char* end_ = nullptr;
  std::vector<Feature> features_;
  std::vector<std::int32_t> labels_;
};

// Cuts the text into about equal parts that end after a newline; parts may be empty.
std::vector<std::string_view> cut(std::string_view text, std::size_t parts) {
  std::vector<std::string_view> result;
  std::size_t begin = 0;
  for (std::size_t i = 1; i <= parts; ++i) {
    std::size_t end = text.size();
    if (i < parts) {
      const std::size_t newline = text.find('\n', std::max(begin, text.size() / parts * i));
      if (newline != std::string_view::npos) end = newline + 1;
    }
    result.push_back(text.substr(begin, end - begin));
    begin = end;
  }
  return result;
}

XcError moved(const XcError& error, std::int64_t lines) {
  return {error.line + lines, error.column, error.kind, error.what()};
}

}  // namespace

std::vector<XcPoints> parse_xc(Pool& pool, std::string_view text, const XcLimits& limits) {
  std::vector<Parser> parsers;
  for (const auto part : cut(text, static_cast<std::size_t>(pool.threads()))) parsers.emplace_back(part, limits);
  pool.run([&](int thread) { parsers[static_cast<std::size_t>(thread)].run(); });

  std::vector<XcPoints> parts;
  std::int64_t lines = 0;
  for (Parser& parser : parsers) {
    if (parser.error) throw moved(*parser.error, lines);
    if (parser.points.first_skipped) parser.points.first_skipped = moved(*parser.points.first_skipped, lines);
    lines += parser.points.lines;
    parts.push_back(std::move(parser.points));
  }
  return parts;
}

}  // namespace dslide
