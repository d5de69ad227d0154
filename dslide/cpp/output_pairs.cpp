// The output layer where each point has its own active rows (lsh): every active row meets the points that activated it.
// Logits are kept by pair, in the order of rows and, within a row, of points.
//
// The rows are cut into kParts parts, each worked on by one thread, and what a point gets from several parts (log-sum-exp,
// hidden gradient) is added up in their order: no races, and the same result for any number of threads. A row comes from
// memory, so the next ones are asked for ahead of time; what is kept by point stays in the cache.
//
// A batch's rows come from memory three times: for its logits, its hidden gradient and its update, the first and the last time
// with their state. So an update may wait for the next batch's logits, and the rows that both batches share then come once for
// both. Every row makes the same steps in the same order as without, and no bit differs.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.hpp"
#include "output_layer.hpp"

namespace dslide {
namespace {

constexpr int kParts = 16;
constexpr std::size_t kAhead = 4;  // rows that are on their way from memory

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
  const Kernels& kern = kernels();
  const bool catches_up = state_.optimizer().catches_up();
  const std::size_t pairs = active_.pair_points.size(), hidden = static_cast<std::size_t>(config_.hidden);
  logits_.at_least(std::max<std::size_t>(1, pairs));
  part_max_.at_least(kParts * std::max<std::size_t>(1, points));
  part_sum_.at_least(kParts * std::max<std::size_t>(1, points));
  own_logits_.resize(active_.own.size());
  own_pairs_.resize(active_.own.size());
  for_parts(active_, [&](int part, std::size_t begin, std::size_t end) {
    float* max = part_max_.data() + static_cast<std::size_t>(part) * points;
    float* sum = part_sum_.data() + static_cast<std::size_t>(part) * points;
    std::fill_n(max, points, kMinusInf);
    std::fill_n(sum, points, 0.0f);
    Buffer<float> copy(config_.half ? hidden : 0);
    std::size_t own = own_range(begin, end).first;
    walk_part(active_, part, begin, end, [&](std::size_t r) {
      if (catches_up) catch_up_row(active_.row(r));
      const std::int64_t from = active_.pair_indptr[r], count = active_.pair_indptr[r + 1] - from;
      const std::int32_t* point = active_.pair_points.data() + from;
      float* logit = logits_.data() + from;
      kern.dots(weights_.as_floats(active_.row(r), copy.data()), h, config_.hidden, point, count, logit, config_.hidden);
      const float bias = config_.bias ? bias_[static_cast<std::size_t>(active_.row(r))] : 0.0f;
      for (std::int64_t i = 0; i < count; ++i) {
        logit[i] += bias;
        max[point[i]] = std::max(max[point[i]], logit[i]);
      }
      for (; own < active_.own.size() && static_cast<std::size_t>(active_.own[own].position) == r; ++own) {
        const std::int64_t i = std::lower_bound(point, point + count, active_.own[own].point) - point;
        own_pairs_[own] = from + i;
        own_logits_[own] = logit[i];
      }
    });
    const std::int64_t from = active_.pair_indptr[begin];
    kern.exp_pairs(logits_.data() + from, active_.pair_points.data() + from, active_.pair_indptr[end] - from, max, sum);
  });
  waiting_.step.reset();
  const auto ld = static_cast<std::ptrdiff_t>(points);
  kern.combine_log_sum(part_max_.data(), part_sum_.data(), kParts, ld, ld, lse);
}

double OutputLayer::backward_pairs(const float* lse, std::size_t points, float* dh) {
  const Kernels& kern = kernels();
  const std::size_t hidden = static_cast<std::size_t>(config_.hidden), size = points * hidden;
  copy_.at_least(kParts * std::max<std::size_t>(1, size));
  double losses[kParts] = {};
  for_parts(active_, [&](int part, std::size_t begin, std::size_t end) {
    // exp(logit - max) becomes the softmax's share of the gradient.
    float* factor = part_max_.data() + static_cast<std::size_t>(part) * points;
    for (std::size_t p = 0; p < points; ++p)
      factor[p] = std::isinf(factor[p]) ? 0.0f : scale_[p] * std::exp(factor[p] - lse[p]);
    float* sum = copy_.data() + static_cast<std::size_t>(part) * size;
    std::fill_n(sum, size, 0.0f);
    Buffer<float> copy(config_.half ? hidden : 0);
    std::size_t own = own_range(begin, end).first;
    for (std::size_t r = begin; r < end; ++r) {
      prefetch_weights(r + kAhead, end);
      const std::int64_t from = active_.pair_indptr[r], count = active_.pair_indptr[r + 1] - from;
      const std::int32_t* point = active_.pair_points.data() + from;
      float* gradient = logits_.data() + from;
      for (std::int64_t i = 0; i < count; ++i) gradient[i] *= factor[point[i]];
      for (; own < active_.own.size() && static_cast<std::size_t>(active_.own[own].position) == r; ++own) {
        const auto p = static_cast<std::size_t>(active_.own[own].point);
        logits_[static_cast<std::size_t>(own_pairs_[own])] -= target_[p];
        losses[part] += static_cast<double>(target_[p]) * static_cast<double>(lse[p] - own_logits_[own]);
      }
      kern.scatter_add(weights_.as_floats(active_.row(r), copy.data()), sum, config_.hidden, point, gradient, count, config_.hidden);
    }
  });
  sum_parts(pool_, copy_.data(), kParts, points, hidden, hidden, dh);
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
