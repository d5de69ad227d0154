// Fuzzes the parser of the XC format against a slow one made of a regular expression and the C library.
//
// reader_fuzz [texts] [seed]: made-up texts, most of them nearly right, are parsed strictly and leniently, by one
// and by several threads. The points, the lines left out and the first bad line have to be the reference's.
#include <regex.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "reader.hpp"

namespace {

using namespace dslide;
using Random = std::mt19937;

int failures = 0;

void check(bool good, const std::string& text, const char* what) {
  if (good) return;
  if (++failures <= 5) {
    std::printf("%s:\n", what);
    for (const char c : text) c >= 0x20 && c < 0x7f ? std::printf("%c", c) : std::printf("\\x%02x%s", c & 0xff, c == '\n' ? "\n" : "");
    std::printf("\n");
  }
}

std::size_t below(Random& random, std::size_t limit) { return random() % limit; }

template <std::size_t N>
std::string one_of(Random& random, const char* const (&words)[N]) {
  return words[below(random, N)];
}

std::string number(Random& random) {
  static const char* const odd[] = {"-1", "0", "00", "-0", "9999999999", "99999999999999999999", "", "x", "+1", "1.0", "2.", "1.5",
                                    "1e0", "1E1", "1e", "1e-400", "1e400", ".5", "nan", "inf", "0x1", "-", "1-", "1 2"};
  return below(random, 8) == 0 ? one_of(random, odd) : std::to_string(below(random, 9));
}

std::string value(Random& random) {
  static const char* const odd[] = {"1e-3", "1.5E2", "-2", "+3", "+-3", "++3", ".5", "5.", ".", "", "nan", "-inf", "3e38", "3.5e38",
                                    "1e39", "1e999", "1e-50", "1e-999", "0x1p3", "1,5", "1:2", "12345678901234567890.5"};
  if (below(random, 3) == 0) return one_of(random, odd);
  return std::to_string(below(random, 1000)) + "." + std::to_string(below(random, 1000));
}

std::string made_up(Random& random) {
  static const char* const spaces[] = {" ", " ", " ", " ", "  ", "\t", "", ","};
  static const char* const commas[] = {",", ",", ",", ", ", ",\t", ",,", ""};
  static const char* const ends[] = {"\n", "\n", "\n", "\n", "\r\n", " \n", "\n\n", "#x\n", "\r\r\n"};
  static constexpr char alphabet[] = "0123456789 ,:.-+eE#\n\r\tx";
  std::string text;
  for (std::size_t lines = below(random, 7); lines > 0; --lines) {
    for (std::size_t labels = below(random, 4), i = 0; i < labels; ++i) text += (i > 0 ? one_of(random, commas) : "") + number(random);
    for (std::size_t features = below(random, 5); features > 0; --features)
      text += one_of(random, spaces) + number(random) + (below(random, 30) == 0 ? "" : ":") + value(random);
    if (lines > 1 || below(random, 2) == 0) text += one_of(random, ends);
  }
  for (std::size_t changes = below(random, 3) == 0 ? 1 + below(random, 3) : 0; changes > 0 && !text.empty(); --changes) {
    const std::size_t at = below(random, text.size());
    const char c = below(random, 8) == 0 ? static_cast<char>(random()) : alphabet[below(random, sizeof alphabet - 1)];
    switch (below(random, 3)) {
      case 0: text[at] = c; break;
      case 1: text.insert(at, 1, c); break;
      default: text.erase(at, 1 + below(random, 4));
    }
  }
  return text;
}

struct Point {
  std::map<std::int32_t, float> x;
  std::set<std::int32_t> y;
};

struct Expected {
  std::vector<Point> points;
  std::vector<std::int64_t> bad;  // line numbers
};

// The id of `word` from 0; false unless it is a whole number in range.
bool id_of(const std::string& word, std::int64_t base, std::int64_t limit, std::int32_t* id) {
  errno = 0;
  const double number = std::strtod(word.c_str(), nullptr);
  if (errno == ERANGE || number != std::floor(number)) return false;
  const double from_zero = number - static_cast<double>(base);
  if (!(from_zero >= 0.0 && from_zero < static_cast<double>(limit))) return false;
  *id = static_cast<std::int32_t>(from_zero);
  return true;
}

// Words of `text` between any of `separators`.
std::vector<std::string> words(const std::string& text, const char* separators) {
  std::vector<std::string> found;
  for (std::size_t begin = text.find_first_not_of(separators); begin != std::string::npos;) {
    const std::size_t end = text.find_first_of(separators, begin);
    found.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(separators, end);
  }
  return found;
}

// The format as a regular expression.
class Grammar {
 public:
  Grammar() {
    const std::string digits = "-?[0-9]+", power = "([eE][+-]?[0-9]+)?";
    const std::string label = "(" + digits + "([.][0-9]*)?" + power + ")";
    const std::string feature = "(" + digits + ":[+]?-?([0-9]+[.]?[0-9]*|[.][0-9]+)" + power + ")";
    const std::string line = "^(" + label + "(,[ \t]*" + label + ")*|" + feature + "|)([ \t]+" + feature + ")*[ \t]*$";
    if (regcomp(&compiled_, line.c_str(), REG_EXTENDED | REG_NOSUB) != 0) std::abort();
  }
  ~Grammar() { regfree(&compiled_); }
  Grammar(const Grammar&) = delete;
  Grammar& operator=(const Grammar&) = delete;
  bool matches(const std::string& line) const {
    const bool whole = line.find('\0') == std::string::npos && line.find("+-") == std::string::npos;
    return whole && regexec(&compiled_, line.c_str(), 0, nullptr, 0) == 0;
  }

 private:
  regex_t compiled_{};
};

bool parse_line(const std::string& line, const XcLimits& limits, Point* point) {
  static const Grammar grammar;
  if (!grammar.matches(line)) return false;
  std::map<std::int32_t, double> sums;
  for (const std::string& word : words(line, " \t,")) {
    const std::size_t colon = word.find(':');
    std::int32_t id = 0;
    if (colon == std::string::npos) {
      if (limits.labels == kNoLabels || !id_of(word, limits.label_base, limits.labels, &id)) return false;
      point->y.insert(id);
      continue;
    }
    const float v = std::strtof(word.c_str() + colon + 1, nullptr);
    if (!id_of(word.substr(0, colon), limits.feature_base, limits.features, &id) || !std::isfinite(v)) return false;
    sums[id] += v;
  }
  for (const auto& [id, sum] : sums) {
    point->x[id] = static_cast<float>(sum);
    if (!std::isfinite(point->x[id])) return false;
  }
  return true;
}

Expected reference(const std::string& text, const XcLimits& limits) {
  Expected expected;
  std::int64_t number = 0;
  for (std::size_t begin = 0; begin < text.size(); ++number) {
    const std::size_t newline = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, newline - begin);
    begin = newline + 1;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const std::size_t hash = line.find('#');
    if (limits.comments && hash != std::string::npos) {
      line.resize(hash);
      if (line.find_first_not_of(" \t") == std::string::npos) continue;  // nothing but a comment: no point
    }
    Point point;
    if (parse_line(line, limits, &point))
      expected.points.push_back(point);
    else
      expected.bad.push_back(number);
  }
  return expected;
}

void compare(const std::string& text, const std::vector<XcPoints>& parts, const Expected& expected) {
  std::size_t row = 0;
  std::int64_t skipped = 0, first = -1;
  bool same = true;
  for (const XcPoints& part : parts) {
    std::size_t x = 0, y = 0;
    skipped += part.skipped;
    if (first < 0 && part.first_skipped) first = part.first_skipped->line;
    for (std::size_t i = 0; i < part.x_lengths.size() && same; ++i, ++row) {
      same = row < expected.points.size();
      if (!same) break;
      const Point& want = expected.points[row];
      same = part.x_lengths[i] == static_cast<std::int64_t>(want.x.size()) && part.y_lengths[i] == static_cast<std::int64_t>(want.y.size());
      if (!same) break;
      for (const auto& [id, v] : want.x) {
        same = same && part.x_indices[x] == id && std::abs(part.x_values[x] - v) <= 1e-7f * std::abs(v) + 1e-44f;
        ++x;
      }
      for (const std::int32_t id : want.y) same = same && part.y_indices[y++] == id;
    }
    check(part.x_lengths.size() == part.y_lengths.size() && part.x_indices.size() == part.x_values.size(), text, "lengths of arrays");
  }
  check(same && row == expected.points.size(), text, "points");
  check(skipped == static_cast<std::int64_t>(expected.bad.size()), text, "lines left out");
  check(first == (expected.bad.empty() ? -1 : expected.bad.front()), text, "the first line left out");
}

}  // namespace

int main(int argc, char** argv) {
  const long texts = argc > 1 ? std::atol(argv[1]) : 3000;
  Random random(argc > 2 ? static_cast<unsigned>(std::atol(argv[2])) : 1);
  Pool one(1), three(3);
  long bad = 0;
  for (long i = 0; i < texts; ++i) {
    XcLimits limits{7, i % 5 == 0 ? kNoLabels : 6, static_cast<std::int64_t>(below(random, 2)), static_cast<std::int64_t>(below(random, 2))};
    limits.comments = below(random, 2) == 0;
    limits.lenient = true;
    const std::string text = made_up(random);
    const Expected expected = reference(text, limits);
    bad += expected.bad.empty() ? 0 : 1;
    compare(text, parse_xc(one, text, limits), expected);
    compare(text, parse_xc(three, text, limits), expected);
    limits.lenient = false;
    std::int64_t line = -1;
    try {
      parse_xc(three, text, limits);
    } catch (const XcError& error) {
      line = error.line;
      check(error.column >= 1 && error.what()[0] != '\0', text, "column and reason");
    }
    check(line == (expected.bad.empty() ? -1 : expected.bad.front()), text, "the line that is refused");
  }
  std::printf("%ld texts, %ld of them with bad lines, %d failed\n", texts, bad, failures);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
