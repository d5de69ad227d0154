#include "probe.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>

#include "init.hpp"
#include "kernels.hpp"

namespace dslide {
namespace {

constexpr std::size_t kAhead = 12;  // rows on their way from memory: the best of 8, 12, 16, 24, 32 on an EPYC (Zen 4), hardly

}  // namespace

RowProbe::RowProbe(Pool& pool, std::int64_t rows, std::int64_t width) : pool_(pool), rows_(rows), width_(width) {
  if (rows < 1 || width < 1) throw std::invalid_argument("row probe: rows and width must be positive");
  table_.reset(static_cast<std::size_t>(rows * width));
  vector_.reset(static_cast<std::size_t>(width));
  out_.resize(static_cast<std::size_t>(pool.threads()));
  for (auto& out : out_) out.reset(static_cast<std::size_t>(width));
}

void RowProbe::check(std::int32_t id) const {
  if (id < 0 || id >= rows_) throw std::invalid_argument("row probe: an id lies outside of the table");
}

void RowProbe::update(const std::int32_t* ids, std::size_t count) {
  const Kernels& kern = kernels();
  pool_.run([&](int thread) {
    const auto [begin, end] = Pool::part(count, 1, thread, pool_.threads());
    for (std::size_t i = begin; i < end; ++i) {
      if (i + kAhead < end) prefetch(table_.data() + ids[i + kAhead] * width_, 4 * static_cast<std::size_t>(width_));
      check(ids[i]);
      kern.axpy(0.0f, vector_.data(), table_.data() + ids[i] * width_, width_);
    }
  });
}

void RowProbe::gather(const std::int32_t* ids, std::size_t count, std::size_t group) {
  if (group == 0) throw std::invalid_argument("row probe: a group has at least one row");
  const Kernels& kern = kernels();
  const std::vector<float> weights(group, 1.0f);
  pool_.run([&](int thread) {
    const auto [begin, end] = Pool::part(count, group, thread, pool_.threads());
    for (std::size_t i = begin; i < end; i += group) {
      const std::size_t size = std::min(group, end - i);
      for (std::size_t j = i; j < i + size; ++j) check(ids[j]);
      kern.weighted_sum(table_.data(), width_, ids + i, weights.data(), static_cast<std::ptrdiff_t>(size), nullptr,
                        out_[static_cast<std::size_t>(thread)].data(), width_);
    }
  });
}

void pass_to_and_fro(Pool& pool, std::uint32_t count) {
  if (pool.threads() < 2) throw std::invalid_argument("passing to and fro takes two threads");
  struct alignas(128) Line {
    std::atomic<std::uint32_t> number{0};
    void wait_for(std::uint32_t expected) const {
      for (int spins = 1; number.load(std::memory_order_acquire) != expected; ++spins)
        if (spins % 4096 == 0) std::this_thread::yield();  // both may be on one core
    }
  };
  Line to, fro;
  pool.run([&](int thread) {
    for (std::uint32_t i = 1; thread < 2 && i <= count; ++i) {
      if (thread == 0) to.number.store(i, std::memory_order_release);
      (thread == 0 ? fro : to).wait_for(i);
      if (thread == 1) fro.number.store(i, std::memory_order_release);
    }
  });
}

ProductProbe::ProductProbe(Pool& pool, std::int64_t rows, std::int64_t hidden, std::int64_t points, bool half)
    : pool_(pool), points_(static_cast<std::size_t>(points)) {
  if (rows < 1 || hidden < 1 || points < 1 || (half && hidden % 2 != 0))
    throw std::invalid_argument("product probe: sizes must be positive, and hidden even in bfloat16");
  active_.all = true;
  active_.row_count = static_cast<std::size_t>(rows);
  weights_.reset(rows, hidden, half);
  products_.reset(hidden, half, pool.threads());
  h_.reset(static_cast<std::size_t>(points * hidden));
  dh_.reset(static_cast<std::size_t>(points * hidden));
  fill_normal(pool, Philox(0, Purpose::kOutputWeights), 0, rows, 0, hidden, 1.0f, weights_);
  fill_normal(pool, Philox(0, Purpose::kInputWeights), 0, points, 0, hidden, 1.0f, h_.data(), hidden);
  products_.pack_queries(pool, h_.data(), points_, 0, points_);
  ld_ = static_cast<std::size_t>(products_.logits_ld());
  logits_.reset(active_.row_count * ld_);
  tiles_.resize(static_cast<std::size_t>(pool.threads()));
  for (auto& tile : tiles_)
    tile.reset(OutputProducts::kMostRows * static_cast<std::size_t>(products_.padded_hidden()));
}

void ProductProbe::logits() {
  constexpr std::size_t kRows = OutputProducts::kMostRows;
  products_.pack_queries(pool_, h_.data(), points_, 0, points_);
  pool_.ranges(active_.row_count, kRows, [&](std::size_t begin, std::size_t end) {
    for (std::size_t r = begin; r < end; r += kRows)
      products_.logits(weights_, active_, r, std::min(r + kRows, end), 0, points_, logits_.data() + r * ld_,
                       static_cast<std::ptrdiff_t>(ld_));
  });
}

OutputProducts::Gradient ProductProbe::gradient() {
  return {logits_.data(), static_cast<std::ptrdiff_t>(ld_), [](std::size_t, std::size_t, std::size_t, std::size_t) {}};
}

void ProductProbe::hidden_gradient() {
  products_.hidden_gradient(pool_, weights_, active_, 0, points_, gradient(), dh_.data());
}

void ProductProbe::weight_gradient() {
  constexpr std::size_t kRows = OutputProducts::kUpdateRows;
  products_.pack_points(pool_, h_.data(), static_cast<std::ptrdiff_t>(points_));
  const OutputProducts::Gradient gradient = this->gradient();
  pool_.run([&](int t) {
    const auto thread = static_cast<std::size_t>(t);
    const auto [begin, end] = Pool::part(active_.row_count, kRows, t, pool_.threads());
    for (std::size_t r = begin; r < end; r += kRows)
      products_.weight_gradient(thread, gradient, r, std::min(r + kRows, end), tiles_[thread].data(), nullptr);
  });
}

}  // namespace dslide
