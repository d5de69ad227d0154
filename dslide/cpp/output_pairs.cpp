// The output layer where each point has its own active rows (lsh): every active row meets the points that activated it.
// Logits are kept by pair, in the order of rows and, within a row, of points.
//
// The rows are cut into kParts parts, each worked on by one thread, and what a point gets from several parts (log-sum-exp,
// hidden gradient) is added up in their order: no races, and the same result for any number of threads. A row comes from
// memory, so the next ones are asked for ahead of time; what is kept by point stays in the cache.
//
// A batch needs its rows for the logits, the hidden gradient and the update. The hidden gradient is summed up with the logits,
// before the log-sum-exps are known, as attention is by Dao et al. (2022, FlashAttention, section 3.1), so that a row comes
// from memory once for both. And an update may wait for the next batch's logits, so that the rows that both batches share come
// once for all three. Every row makes the same steps in the same order as without waiting, and no bit differs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {
namespace {

constexpr int kParts = 16;
constexpr std::size_t kAhead = 4;   // rows that are on their way from memory
constexpr std::size_t kGroup = 16;  // rows that are in the nearest caches together
constexpr std::int32_t kFar = 64;   // rows whose own step and bias are on their way: many to a cache line

// First position of a part: parts cost about the same, a row about as much as kRowCost pairs.
std::size_t part_begin(const ActiveSet& active, int part) {
  constexpr std::int64_t kRowCost = 8;
  const auto& indptr = active.pair_indptr;
  const auto cost = [&](std::size_t row) { return indptr[row] + kRowCost * static_cast<std::int64_t>(row); };
  const std::int64_t goal = cost(active.row_count) * part / kParts;
  std::size_t low = 0, high = active.row_count;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (cost(middle) < goal) low = middle + 1;
    else high = middle;
  }
  return low;
}

}  // namespace

// The rows of a part: those that are active in it, those that wait between them, or all. Ascending.
class OutputLayer::RowWalk {
 public:
  // Of positions [begin, end) of `active`, and of rows [first, last) of `waiting`, which may be null.
  RowWalk(const ActiveSet& active, std::size_t begin, std::size_t end, const ActiveSet* waiting, std::int32_t first,
          std::int32_t last, bool every)
      : active_(active.rows.data() + begin), active_end_(active.rows.data() + end), row_(first), last_(last), every_(every) {
    if (waiting != nullptr) {
      const auto& rows = waiting->rows;
      waiting_ = rows.data() + (std::lower_bound(rows.begin(), rows.end(), first) - rows.begin());
      waiting_end_ = rows.data() + (std::lower_bound(rows.begin(), rows.end(), last) - rows.begin());
    }
    if (!every_) find();
  }

  bool done() const { return row_ >= last_; }
  std::int32_t row() const { return row_; }
  bool active() const { return active_ != active_end_ && *active_ == row_; }
  bool waiting() const { return waiting_ != waiting_end_ && *waiting_ == row_; }
  std::size_t active_position(const ActiveSet& set) const { return static_cast<std::size_t>(active_ - set.rows.data()); }
  std::size_t waiting_position(const ActiveSet& set) const { return static_cast<std::size_t>(waiting_ - set.rows.data()); }
  void next() {
    const bool was_active = active(), was_waiting = waiting();
    active_ += was_active ? 1 : 0;
    waiting_ += was_waiting ? 1 : 0;
    if (every_) ++row_;
    else find();
  }

 private:
  void find() { row_ = std::min(active_ == active_end_ ? last_ : *active_, waiting_ == waiting_end_ ? last_ : *waiting_); }

  const std::int32_t *active_, *active_end_, *waiting_ = nullptr, *waiting_end_ = nullptr;
  std::int32_t row_, last_;
  bool every_;
};

void OutputLayer::for_parts(const ActiveSet& active, const std::function<void(int, std::size_t, std::size_t)>& body) {
  pool_.run([&](int thread) {
    for (int part = thread; part < kParts; part += pool_.threads())
      body(part, part_begin(active, part), part_begin(active, part + 1));
  });
}

// Calls meet(position) for the part's active rows, each after its update where it waits for one; updates the other rows that
// wait, too.
template <class Meet>
void OutputLayer::walk_part(const ActiveSet& active, int part, std::size_t begin, std::size_t end, Meet meet) {
  const auto border = [&](int p, std::size_t position) {
    if (p == 0) return std::int32_t{0};
    return position < active.row_count ? active.rows[position] : static_cast<std::int32_t>(config_.shard.size());
  };
  Buffer<float> g(waiting_.step ? static_cast<std::size_t>(config_.hidden) : 0);
  const bool every = waiting_.step.has_value() && state_.optimizer().dense(), catches_up = state_.optimizer().catches_up();
  RowWalk here(active, begin, end, waiting_.step ? &waiting_.active : nullptr, border(part, begin), border(part + 1, end), every);
  RowWalk ahead = here;
  const auto ask = [&] {
    if (ahead.done()) return;
    prefetch_single(ahead.row() + kFar);
    weights_.prefetch(ahead.row());
    if (every || ahead.waiting()) state_.prefetch(ahead.row());
    else if (catches_up) state_.prefetch_missed(ahead.row());
    ahead.next();
  };
  for (std::size_t i = 0; i < kAhead; ++i) ask();
  for (; !here.done(); here.next()) {
    ask();
    if (here.waiting()) update_waiting(here.row(), here.waiting_position(waiting_.active), g.data());
    else if (every) update_row(here.row(), nullptr, 0.0f, *waiting_.step);
    if (here.active()) meet(here.active_position(active));
  }
}

// `g` [hidden] is scratch.
void OutputLayer::update_waiting(std::int32_t row, std::size_t position, float* g) {
  const std::int64_t from = waiting_.active.pair_indptr[position], to = waiting_.active.pair_indptr[position + 1];
  const float* gradient = waiting_.gradients.data();
  kernels().weighted_sum(waiting_.h.data(), config_.hidden, waiting_.active.pair_points.data() + from, gradient + from, to - from,
                         nullptr, g, config_.hidden);
  float bias_gradient = 0.0f;
  for (std::int64_t i = from; i < to; ++i) bias_gradient += gradient[i];
  update_row(row, g, bias_gradient, *waiting_.step);
}

void OutputLayer::forward_pairs(const float* h, std::size_t points, float* lse) {
  constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
  constexpr float kSlack = 8.0f;  // exponentials are of logits less a point's first, or one that passed that by so much
  const Kernels& kern = kernels();
  const bool catches_up = state_.optimizer().catches_up();
  const std::size_t pairs = active_.pair_points.size(), hidden = static_cast<std::size_t>(config_.hidden), size = points * hidden;
  logits_.at_least(std::max<std::size_t>(1, pairs));
  part_max_.at_least(kParts * std::max<std::size_t>(1, points));
  part_sum_.at_least(kParts * std::max<std::size_t>(1, points));
  part_rows_.at_least(kParts * std::max<std::size_t>(1, size));
  own_logits_.resize(active_.own.size());
  own_pairs_.resize(active_.own.size());
  own_rows_.at_least(std::max<std::size_t>(1, active_.own.size() * hidden));
  for_parts(active_, [&](int part, std::size_t begin, std::size_t end) {
    float* max = part_max_.data() + static_cast<std::size_t>(part) * points;
    float* sum = part_sum_.data() + static_cast<std::size_t>(part) * points;
    float* rows = part_rows_.data() + static_cast<std::size_t>(part) * size;
    std::fill_n(max, points, kMinusInf);
    std::fill_n(sum, points, 0.0f);
    std::fill_n(rows, size, 0.0f);
    Buffer<float> copies(config_.half ? kGroup * hidden : 0);
    std::vector<float> exponentials;
    const float* group[kGroup];  // rows whose logits are there
    std::size_t grouped = begin, own = own_range(begin, end).first;
    const auto row_pairs = [&](std::size_t r) { return active_.pair_indptr[r + 1] - active_.pair_indptr[r]; };
    // Exponentials, their sums, and the rows that these weigh, of positions [grouped, last).
    const auto finish_group = [&](std::size_t last) {
      const std::int64_t from = active_.pair_indptr[grouped], count = active_.pair_indptr[last] - from;
      const std::int32_t* point = active_.pair_points.data() + from;
      const float* logit = logits_.data() + from;
      for (std::int64_t i = 0; i < count; ++i) {
        const auto p = static_cast<std::size_t>(point[i]);
        if (!(logit[i] > max[p] + kSlack)) continue;
        const float scale = std::exp(max[p] - logit[i]);  // 0 for a point's first
        for (std::size_t j = p * hidden; j < (p + 1) * hidden; ++j) rows[j] *= scale;
        sum[p] *= scale;
        max[p] = logit[i];
      }
      exponentials.resize(std::max(exponentials.size(), static_cast<std::size_t>(count)));
      float* e = exponentials.data();
      kern.exp_pairs(logit, point, count, max, e);
      for (std::int64_t i = 0; i < count; ++i) sum[point[i]] += e[i];
      for (std::size_t r = grouped; r < last; ++r) {
        const std::int64_t first = active_.pair_indptr[r] - from;
        kern.scatter_add(group[r - grouped], rows, config_.hidden, point + first, e + first, row_pairs(r), config_.hidden);
      }
      grouped = last;
    };
    walk_part(active_, part, begin, end, [&](std::size_t r) {
      if (catches_up) catch_up_row(active_.row(r));
      const std::int64_t from = active_.pair_indptr[r], count = row_pairs(r);
      const std::int32_t* point = active_.pair_points.data() + from;
      const float* w = weights_.as_floats(active_.row(r), copies.data() + (config_.half ? (r - grouped) * hidden : 0));
      group[r - grouped] = w;
      float* logit = logits_.data() + from;
      kern.dots(w, h, config_.hidden, point, count, logit, config_.hidden);
      if (config_.bias)
        for (std::int64_t i = 0; i < count; ++i) logit[i] += bias_[static_cast<std::size_t>(active_.row(r))];
      for (; own < active_.own.size() && static_cast<std::size_t>(active_.own[own].position) == r; ++own) {
        const std::int64_t i = std::lower_bound(point, point + count, active_.own[own].point) - point;
        own_pairs_[own] = from + i;
        own_logits_[own] = logit[i];
        std::copy_n(w, hidden, own_rows_.data() + own * hidden);
      }
      if (r + 1 == grouped + kGroup) finish_group(r + 1);
    });
    finish_group(end);
  });
  waiting_.step.reset();
  const auto ld = static_cast<std::ptrdiff_t>(points);
  kern.combine_log_sum(part_max_.data(), part_sum_.data(), kParts, ld, ld, lse);
}

// The softmax's share of the hidden gradient has been summed up already, but for a factor of each part and point.
double OutputLayer::backward_pairs(const float* lse, std::size_t points, float* dh) {
  const Kernels& kern = kernels();
  const std::size_t hidden = static_cast<std::size_t>(config_.hidden);
  double losses[kParts] = {};
  std::vector<float> shift(points);  // exp(logit - shift) is a pair's gradient
  for (std::size_t p = 0; p < points; ++p) shift[p] = lse[p] - std::log(scale_[p]);
  for_parts(active_, [&](int part, std::size_t begin, std::size_t end) {
    const std::int64_t from = active_.pair_indptr[begin], count = active_.pair_indptr[end] - from;
    kern.exp_pairs(logits_.data() + from, active_.pair_points.data() + from, count, shift.data(), logits_.data() + from);
    const auto [own, own_end] = own_range(begin, end);
    for (std::size_t i = own; i < own_end; ++i) {
      const auto p = static_cast<std::size_t>(active_.own[i].point);
      logits_[static_cast<std::size_t>(own_pairs_[i])] -= target_[p];
      losses[part] += static_cast<double>(target_[p]) * static_cast<double>(lse[p] - own_logits_[i]);
    }
  });
  pool_.ranges(points, 1, [&](std::size_t begin, std::size_t end) {
    std::int32_t parts[kParts];
    float factor[kParts];
    std::iota(parts, parts + kParts, 0);
    for (std::size_t p = begin; p < end; ++p) {
      for (std::size_t part = 0; part < kParts; ++part) {
        const float max = part_max_[part * points + p];
        factor[part] = std::isinf(max) ? 0.0f : std::exp(max - shift[p]);  // no active rows in that part
      }
      kern.weighted_sum(part_rows_.data() + p * hidden, static_cast<std::ptrdiff_t>(points * hidden), parts, factor, kParts,
                        nullptr, dh + p * hidden, config_.hidden);
    }
    for (std::size_t i = 0; i < active_.own.size(); ++i) {
      const auto p = static_cast<std::size_t>(active_.own[i].point);
      if (p >= begin && p < end) kern.axpy(-target_[p], own_rows_.data() + i * hidden, dh + p * hidden, config_.hidden);
    }
  });
  double loss = 0.0;
  for (const double part : losses) loss += part;
  return loss;
}

// Leaves the batch's update to update_all_waiting() or the next forward pass.
void OutputLayer::wait_pairs(const WeightTable::Step& step) {
  std::swap(waiting_.active, active_);
  std::swap(waiting_.gradients, logits_);
  const std::size_t size = points_ * static_cast<std::size_t>(config_.hidden);
  std::copy_n(h_, size, waiting_.h.at_least(std::max<std::size_t>(1, size)));
  waiting_.step = step;
}

void OutputLayer::update_all_waiting() {
  if (!waiting_.step) return;
  for_parts(waiting_.active, [&](int part, std::size_t begin, std::size_t end) {
    walk_part(waiting_.active, part, begin, end, [](std::size_t) {});
  });
  waiting_.step.reset();
}

}  // namespace dslide
