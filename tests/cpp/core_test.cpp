// The core's own test program: every kernel of every instruction set of this CPU against the slow reference, and whole
// training steps with several threads. Built and run by pytest, plain and under each sanitizer.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>

#include "batch.hpp"
#include "gemm.hpp"
#include "input_layer.hpp"
#include "missed_steps.hpp"
#include "output_layer.hpp"
#include "philox.hpp"
#include "probe.hpp"
#include "reference.hpp"
#include "samplers.hpp"
#include "tables.hpp"
#include "wire.hpp"

using namespace dslide;

namespace {

int failures = 0, checks = 0;

void check(bool good, const std::string& what) {
  ++checks;
  if (good) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

void near(double got, double want, double tolerance, const std::string& what) {
  const bool same_infinity = std::isinf(want) && got == want;
  check(same_infinity || std::abs(got - want) <= tolerance * (1.0 + std::abs(want)),
        what + ": got " + std::to_string(got) + ", want " + std::to_string(want));
}

std::vector<float> draw(std::mt19937& random, std::size_t n, float scale = 1.0f) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

void test_kernels(const Kernels& kern) {
  std::mt19937 random(7);
  const std::string isa = kern.name;
  for (const std::ptrdiff_t n : {1, 3, 8, 16, 31, 64, 128, 200}) {
    const std::string at = isa + " n=" + std::to_string(n) + " ";
    const auto size = static_cast<std::size_t>(n);
    const std::ptrdiff_t rows = 37;
    const auto table = draw(random, static_cast<std::size_t>(rows) * size);
    const auto w = draw(random, size), bias = draw(random, size);
    const std::vector<std::int32_t> ids{3, 0, 36, 3, 12, 7, 8, 9, 10, 11, 12, 35};
    const auto values = draw(random, ids.size());
    std::vector<float> out(size), dots(ids.size());
    kern.weighted_sum(table.data(), n, ids.data(), values.data(), static_cast<std::ptrdiff_t>(ids.size()), bias.data(), out.data(), n);
    for (std::size_t i = 0; i < size; ++i) {
      double want = bias[i];
      for (std::size_t j = 0; j < ids.size(); ++j) want += double{values[j]} * table[static_cast<std::size_t>(ids[j]) * size + i];
      near(out[i], want, 1e-5, at + "weighted_sum");
    }
    kern.dots(w.data(), table.data(), n, ids.data(), static_cast<std::ptrdiff_t>(ids.size()), dots.data(), n);
    for (std::size_t j = 0; j < ids.size(); ++j) {
      double want = 0.0;
      for (std::size_t i = 0; i < size; ++i) want += double{w[i]} * table[static_cast<std::size_t>(ids[j]) * size + i];
      near(dots[j], want, 1e-4, at + "dots");
    }
    for (const FeatureUnits which : {FeatureUnits{2, 1, 1}, FeatureUnits{6, 2, 1}, FeatureUnits{4, 1, 3}, FeatureUnits{2, 0, 2}}) {
      std::uniform_int_distribution<std::int32_t> any(0, 2'000'000'000);
      std::vector<std::int32_t> features(size), want_ids, taken_ids(size + Kernels::kTakenSlack);
      std::vector<float> want_values, taken_values(taken_ids.size());
      for (std::size_t i = 0; i < size; ++i) {
        features[i] = any(random) >> (i % 3 * 8);
        const std::uint32_t hash = static_cast<std::uint32_t>(features[i] / 64) * 2654435769u;
        const auto unit = static_cast<std::uint32_t>(std::floor(std::ldexp(static_cast<double>(hash) * static_cast<double>(which.units), -32)));
        if (unit < which.first || unit >= which.first + which.count) continue;
        want_ids.push_back(features[i]);
        want_values.push_back(w[i]);
      }
      const auto taken = kern.take_features(features.data(), w.data(), n, which, taken_ids.data(), taken_values.data());
      taken_ids.resize(static_cast<std::size_t>(taken));
      taken_values.resize(static_cast<std::size_t>(taken));
      check(taken_ids == want_ids && taken_values == want_values, at + "take_features");
    }
    auto scattered = table;
    kern.scatter_add(w.data(), scattered.data(), n, ids.data(), values.data(), static_cast<std::ptrdiff_t>(ids.size()), n);
    for (std::size_t i = 0; i < size; ++i)
      near(scattered[3 * size + i], table[3 * size + i] + double{values[0] + values[3]} * w[i], 1e-5, at + "scatter_add");

    // A log-sum-exp over columns, with a column of -inf.
    auto logits = draw(random, static_cast<std::size_t>(rows) * size, 5.0f);
    const float minus_inf = -std::numeric_limits<float>::infinity();
    for (std::ptrdiff_t r = 0; r < rows; ++r) logits[static_cast<std::size_t>(r) * size] = minus_inf;
    std::vector<float> max(2 * size), sum(2 * size), lse(size), shift_by(37);
    for (std::size_t r = 0; r < shift_by.size(); ++r) shift_by[r] = 0.1f * static_cast<float>(r % 5);
    auto exponentials = logits;
    kern.column_exp_sum(exponentials.data(), 20, n, n, shift_by.data(), max.data(), sum.data());
    kern.column_exp_sum(exponentials.data() + 20 * n, rows - 20, n, n, shift_by.data() + 20, max.data() + size, sum.data() + size);
    kern.combine_log_sum(max.data(), sum.data(), 2, n, n, lse.data());
    for (std::size_t i = 0; i < size; ++i) {
      std::vector<double> shifted;
      for (std::size_t r = 0; r < static_cast<std::size_t>(rows); ++r) {
        shifted.push_back(double{logits[r * size + i]} + double{shift_by[r]});
        if (i > 0) near(exponentials[r * size + i], std::exp(shifted[r] - max[r < 20 ? i : size + i]), 2e-6, at + "column_exp_sum");
      }
      near(lse[i], i == 0 ? double{minus_inf} : reference::log_sum_exp(shifted), 1e-5, at + "column log-sum-exp");
    }
    for (const std::size_t r : {std::size_t{0}, std::size_t{5}, std::size_t{19}, std::size_t{36}}) {
      exponentials = logits;
      exponentials[r * size + size - 1] = std::numeric_limits<float>::quiet_NaN();
      kern.column_exp_sum(exponentials.data(), 20, n, n, shift_by.data(), max.data(), sum.data());
      kern.column_exp_sum(exponentials.data() + 20 * n, rows - 20, n, n, shift_by.data() + 20, max.data() + size, sum.data() + size);
      kern.combine_log_sum(max.data(), sum.data(), 2, n, n, lse.data());
      check(std::isnan(lse[size - 1]), at + "log-sum-exp of what is not a number");
    }
    std::vector<double> row(logits.begin() + n, logits.begin() + 2 * n);

    // A log-sum-exp in three pieces: nothing, the row, the row again and larger by 3.
    float running_max = minus_inf, running_sum = 0.0f;
    near(kern.log_sum_update(nullptr, 0, &running_max, &running_sum), double{minus_inf}, 0.0, at + "maximum of nothing");
    check(running_max == minus_inf && running_sum == 0.0f, at + "log_sum_update with nothing");
    std::vector<float> larger(logits.begin() + n, logits.begin() + 2 * n);
    const double top = *std::max_element(row.begin(), row.end());
    near(kern.log_sum_update(larger.data(), n, &running_max, &running_sum), top, 0.0, at + "maximum");
    for (float& x : larger) x += 3.0f;
    near(kern.log_sum_update(larger.data(), n, nullptr, nullptr), top + 3.0, 1e-6, at + "maximum alone");
    kern.log_sum_update(larger.data(), n, &running_max, &running_sum);
    for (std::ptrdiff_t i = 0; i < n; ++i) row.push_back(row[static_cast<std::size_t>(i)] + 3.0);
    near(running_max + std::log(double{running_sum}), reference::log_sum_exp(row), 1e-5, at + "log_sum_update");

    for (const std::ptrdiff_t taken : {std::ptrdiff_t{1}, std::ptrdiff_t{kern.nr / 2 + 1}, std::ptrdiff_t{kern.nr}}) {
      std::vector<float> panel(size * static_cast<std::size_t>(kern.nr), 7.0f);
      kern.pack_panel(table.data(), n, taken, n, panel.data());
      bool same = true;
      for (std::ptrdiff_t i = 0; i < n; ++i)
        for (std::ptrdiff_t r = 0; r < kern.nr; ++r)
          same = same && panel[static_cast<std::size_t>(i * kern.nr + r)] == (r < taken ? table[static_cast<std::size_t>(r * n + i)] : 0.0f);
      check(same, at + "pack_panel of " + std::to_string(taken) + " rows");
    }

    auto gradient = draw(random, size, 3.0f);
    const auto before = gradient, shift = draw(random, size);
    kern.softmax_gradient(gradient.data(), shift.data(), bias.data(), n);
    for (std::size_t i = 0; i < size; ++i)
      near(gradient[i], std::exp(double{before[i]} - shift[i]) * bias[i], 2e-6, at + "softmax_gradient");

    auto product = before;
    kern.multiply(product.data(), w.data(), n);
    auto activation = before;
    std::vector<float> derivative(size);
    kern.activate(activation.data(), bias.data(), 0.4f, derivative.data(), n);
    for (std::size_t i = 0; i < size; ++i) {
      near(product[i], double{before[i]} * w[i], 1e-6, at + "multiply");
      near(derivative[i], (before[i] > 0.0f ? 1.0 : 0.4) * bias[i], 1e-6, at + "activate's derivative");
      near(activation[i], double{before[i]} * derivative[i], 1e-6, at + "activate");
    }

    // Exponentials by pair: 12 of them for the 37 rows.
    auto pair_logits = draw(random, ids.size(), 3.0f);
    const auto pair_before = pair_logits;
    const std::vector<float> pair_shift = draw(random, static_cast<std::size_t>(rows));
    kern.exp_pairs(pair_logits.data(), ids.data(), static_cast<std::ptrdiff_t>(ids.size()), pair_shift.data(), pair_logits.data());
    for (std::size_t j = 0; j < ids.size(); ++j)
      near(pair_logits[j], std::exp(double{pair_before[j]} - pair_shift[static_cast<std::size_t>(ids[j])]), 2e-6, at + "exp_pairs");
    const float inf = std::numeric_limits<float>::infinity(), unknown = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> ends{-inf, -1000.0f, -87.25f, -86.75f, -50.0f, -0.0f, 1e-9f, 87.75f};
    std::vector<float> of_ends(17 * ends.size(), unknown);  // whole vectors and a rest
    const std::vector<std::int32_t> no_shift(of_ends.size(), 0);
    for (std::size_t i = 0; i < of_ends.size(); ++i) of_ends[i] = i % 17 == 16 ? unknown : ends[i % 17 % ends.size()];
    const auto ends_before = of_ends;
    const float zero = 0.0f;
    kern.exp_pairs(of_ends.data(), no_shift.data(), static_cast<std::ptrdiff_t>(of_ends.size()), &zero, of_ends.data());
    for (std::size_t i = 0; i < of_ends.size(); ++i) {
      if (std::isnan(ends_before[i])) check(std::isnan(of_ends[i]), at + "exp of what is not a number");
      else if (ends_before[i] < -87.0f) check(of_ends[i] == 0.0f, at + "exp of little");
      else near(of_ends[i] / std::exp(double{ends_before[i]}), 1.0, 5e-7, at + "exp");
    }

    // Winners among 8 of n coordinates: ties, zeros that are missing or values, a bin with nothing.
    for (const bool zeros : {false, true}) {
      const auto side = static_cast<std::size_t>(kern.nr);
      std::vector<float> columns(size * side);
      for (float& value : columns) value = random() % 3 == 0 ? minus_inf : static_cast<float>(random() % 5) - 1.0f;
      std::vector<std::int32_t> bins, best(5 * side);
      for (int i = 0; i < 5 * 8; ++i) bins.push_back(static_cast<std::int32_t>(random() % size));
      for (std::size_t i = 0; i < 8; ++i) columns[static_cast<std::size_t>(bins[i]) * side + 3] = i % 2 == 0 && !zeros ? 0.0f : minus_inf;
      const auto columns_before = columns;
      check(kern.winners(columns.data(), n, zeros, bins.data(), 5, best.data()), at + "winners: one bin has none");
      for (std::size_t b = 0; b < 5; ++b)
        for (std::size_t r = 0; r < side; ++r) {
          std::int32_t place = -1;
          float top = minus_inf;
          for (std::size_t i = 0; i < 8; ++i) {
            const float value = columns_before[static_cast<std::size_t>(bins[b * 8 + i]) * side + r];
            if (value > top && (zeros || value != 0.0f)) {
              top = value;
              place = static_cast<std::int32_t>(i);
            }
          }
          check(best[b * side + r] == place, at + "winners");
        }
      for (std::int32_t& place : best) place = std::max(place, 0);
      const std::size_t rows = zeros ? side : side - 1, stride = side + 3;
      std::vector<std::uint32_t> codes(2 * stride, 99);
      kern.join_codes(best.data(), 2, 2, 2, static_cast<std::ptrdiff_t>(rows), codes.data(), static_cast<std::ptrdiff_t>(stride));
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const std::size_t t = i / stride, r = i % stride;
        const std::int32_t want = r < rows ? 4 * best[2 * t * side + r] + best[(2 * t + 1) * side + r] : 99;
        check(codes[i] == static_cast<std::uint32_t>(want), at + "join_codes");
      }
    }

    auto weight = w;
    std::vector<float> state(size, 0.25f);
    kern.adagrad(weight.data(), state.data(), out.data(), n, 16, 0.1f, 1e-3f);
    for (std::size_t b = 0; b * 16 < size; ++b) {
      double mean = 0.0;
      const std::size_t end = std::min(size, b * 16 + 16);
      for (std::size_t i = b * 16; i < end; ++i) mean += double{out[i]} * out[i] / static_cast<double>(end - b * 16);
      near(state[b], 0.25 + mean, 1e-5, at + "adagrad state");
      for (std::size_t i = b * 16; i < end; ++i)
        near(weight[i], w[i] - 0.1 * out[i] / (std::sqrt(0.25 + mean) + 1e-3), 1e-5, at + "adagrad weight");
    }
    // Together with the sum that makes the gradient: the same bits, for blocks that stay in registers and others.
    for (const std::ptrdiff_t block : {16, 24})
      for (const std::ptrdiff_t count : {1, 12}) {
        auto apart = w, together = w;
        std::vector<float> sum(size), scratch(size), apart_state(size, 0.25f), together_state(size, 0.25f);
        kern.weighted_sum(table.data(), n, ids.data(), values.data(), count, nullptr, sum.data(), n);
        kern.adagrad(apart.data(), apart_state.data(), sum.data(), n, block, 0.1f, 1e-3f);
        kern.adagrad_sum(table.data(), n, ids.data(), values.data(), count, together.data(), together_state.data(),
                         scratch.data(), n, block, 0.1f, 1e-3f);
        check(apart == together && apart_state == together_state, at + "adagrad_sum");
        // In bfloat16 both are that of the expanded row, rounded once.
        std::vector<std::uint16_t> begin(size), half(size), rounded(size);
        kern.round(w.data(), n, begin.data());
        kern.expand(begin.data(), n, apart.data());
        apart_state.assign(size, 0.25f);
        kern.adagrad(apart.data(), apart_state.data(), sum.data(), n, block, 0.1f, 1e-3f);
        kern.round_stochastic(apart.data(), n, 11, 7, 0, rounded.data());
        for (const bool summed : {false, true}) {
          half = begin;
          together_state.assign(size, 0.25f);
          if (summed)
            kern.adagrad_sum_half(table.data(), n, ids.data(), values.data(), count, half.data(), together_state.data(),
                                  scratch.data(), n, block, 0.1f, 1e-3f, 11, 7);
          else
            kern.adagrad_half(half.data(), together_state.data(), sum.data(), n, block, 0.1f, 1e-3f, 11, 7);
          check(half == rounded && apart_state == together_state, at + (summed ? "adagrad_sum_half" : "adagrad_half"));
        }
      }
    weight = w;
    auto m = bias, v = std::vector<float>(size, 0.5f);
    kern.adam(weight.data(), m.data(), v.data(), out.data(), n, {0.01f, 1e-8f, 0.9f, 0.999f, 0.7f, 0.99f});
    for (std::size_t i = 0; i < size; ++i) {
      const double mm = 0.7 * bias[i] + 0.1 * out[i], vv = 0.99 * 0.5 + 0.001 * double{out[i]} * out[i];
      near(m[i], mm, 1e-5, at + "adam m");
      near(v[i], vv, 1e-5, at + "adam v");
      near(weight[i], w[i] - 0.01 * mm / (std::sqrt(vv) + 1e-8), 1e-5, at + "adam weight");
    }
    // Missed steps at once against one after another, with a rate that changes.
    for (const std::uint32_t missed : {1u, 2u, 9u, 150u, 4000u}) {
      MissedSteps steps;
      steps.reset(0.9f, 0.999f);
      weight = w;
      m = bias;
      for (std::size_t i = 0; i < size; ++i) v[i] = std::pow(10.0f, -static_cast<float>(i % 14));
      std::vector<double> want(w.begin(), w.end()), mm(m.begin(), m.end()), vv(v.begin(), v.end());
      for (int before = 0; before < 3; ++before) steps.advance(1.0f);
      for (std::uint32_t k = 0; k < missed; ++k) {
        const float rate = 0.002f / static_cast<float>(1 + k);
        steps.advance(rate);
        for (std::size_t i = 0; i < size; ++i) {
          mm[i] *= double{0.9f};
          vv[i] *= double{0.999f};
          want[i] -= rate * mm[i] / (std::sqrt(vv[i]) + 1e-4);
        }
      }
      const auto since = steps.since(3);
      auto alone = weight;
      const auto m_before = m, v_before = v;
      kern.adam_missed(alone.data(), m.data(), v.data(), n, since.terms, steps.count(), nullptr, 1e-4f);
      check(m == m_before && v == v_before, at + "adam_missed: moments that stay");
      kern.adam_missed(weight.data(), m.data(), v.data(), n, since.terms, steps.count(), since.decay, 1e-4f);
      check(alone == weight, at + "adam_missed: the same weights with moments that stay");
      for (std::size_t i = 0; i < size; ++i) {
        near(weight[i], want[i], 1e-6, at + "adam_missed weight");
        near(m[i], mm[i], 1e-6, at + "adam_missed m");
        near(v[i] / vv[i], 1.0, 1e-5, at + "adam_missed v");
      }
    }
    // In bfloat16: a row that is expanded, moved in float32 and rounded, weights and moments by draws of their own.
    std::vector<std::uint16_t> halves[3], rounded(size);
    std::vector<float> wide[3];
    const auto start = [&] {
      for (std::size_t part = 0; part < 3; ++part) {
        halves[part].resize(size);
        wide[part].resize(size);
        for (std::size_t i = 0; i < size; ++i)
          halves[part][i] = reference::to_bfloat16(part == 0 ? w[i] : part == 1 ? bias[i] : bias[i] * bias[i]);
        kern.expand(halves[part].data(), n, wide[part].data());
      }
    };
    const auto same = [&](const std::string& what) {
      for (std::size_t part = 0; part < 3; ++part) {
        kern.round_stochastic(wide[part].data(), n, 11, 7, static_cast<int>(part), rounded.data());
        check(halves[part] == rounded, at + what + std::to_string(part));
      }
    };
    for (const float* g : {static_cast<const float*>(out.data()), static_cast<const float*>(nullptr)}) {
      start();
      const AdamStep step{0.01f, 1e-5f, 0.9f, 0.999f, 0.8f, 0.99f};
      kern.adam(wide[0].data(), wide[1].data(), wide[2].data(), g, n, step);
      kern.adam_half(halves[0].data(), halves[1].data(), halves[2].data(), g, n, step, 11, 7);
      same("adam_half, part ");
    }
    MissedSteps steps;
    steps.reset(0.9f, 0.999f);
    for (int k = 0; k < 5; ++k) steps.advance(0.01f);
    const auto since = steps.since(0);
    for (const float* decay : {since.decay, static_cast<const float*>(nullptr)}) {
      start();
      kern.adam_missed(wide[0].data(), wide[1].data(), wide[2].data(), n, since.terms, steps.count(), decay, 1e-5f);
      kern.adam_missed_half(halves[0].data(), halves[1].data(), halves[2].data(), n, since.terms, steps.count(), decay, 1e-5f,
                            11, 7);
      same("adam_missed_half, part ");
    }
    std::vector<std::int8_t> small(size);
    std::vector<float> restored(size, 1.0f);
    const float scale = kern.quantise(w.data(), n, small.data());
    float largest = 0.0f;
    for (const float x : w) largest = std::max(largest, std::abs(x));
    check(scale == largest / 127.0f, at + "int8's scale");
    kern.dequantise(small.data(), scale, n, restored.data(), true);
    for (std::size_t i = 0; i < size; ++i) near(restored[i] - 1.0, w[i], 0.51 * scale + 1e-6, at + "int8");
  }
  // Dropout: the halves of Philox's words, in order.
  const Philox dropout(5, Purpose::kDropout);
  const std::ptrdiff_t groups = 21;
  std::vector<float> factors(static_cast<std::size_t>(groups) * 8);
  kern.dropout(dropout.key(), (std::uint64_t{1} << 32) - 3, 77, groups, 20000, 1.5f, factors.data());
  for (std::size_t g = 0; g < static_cast<std::size_t>(groups); ++g) {
    const auto words = dropout((std::uint64_t{1} << 32) - 3 + g, 77);
    for (std::size_t i = 0; i < 8; ++i)
      near(factors[8 * g + i], (words[i / 2] >> (16 * (i % 2)) & 0xFFFFu) < 20000 ? 0.0 : 1.5, 0.0, isa + " dropout");
  }
  // Normal numbers: the Box-Muller transform of Philox's words, and the moments of many.
  const Philox philox(9, Purpose::kInputWeights);
  const std::ptrdiff_t philox_rows = 1001, philox_columns = 5;
  std::vector<float> normal(static_cast<std::size_t>(philox_rows * philox_columns * 4));
  kern.normals(philox.key(), 100, 7, philox_rows, philox_columns, 2.0f, normal.data());
  double moments[5] = {};
  for (std::ptrdiff_t r = 0; r < philox_rows; ++r)
    for (std::ptrdiff_t c = 0; c < philox_columns; ++c) {
      const auto words = philox(100 + static_cast<std::uint64_t>(r), 7 + static_cast<std::uint64_t>(c));
      for (std::size_t half = 0; half < 2; ++half) {
        const double radius = 2.0 * std::sqrt(-2.0 * std::log(((words[2 * half] >> 8) + 1.0) / 16777216.0));
        const double angle = (words[2 * half + 1] >> 8) * (2.0 * M_PI / 16777216.0);
        const float* got = normal.data() + (r * philox_columns + c) * 4 + 2 * static_cast<std::ptrdiff_t>(half);
        near(got[0], radius * std::cos(angle), 2e-6, isa + " normals");
        near(got[1], radius * std::sin(angle), 2e-6, isa + " normals");
      }
    }
  for (const float v : normal)
    for (int power = 1; power <= 4; ++power) moments[power] += std::pow(v / 2.0, power) / static_cast<double>(normal.size());
  check(std::abs(moments[1]) < 0.03 && std::abs(moments[2] - 1.0) < 0.04 && std::abs(moments[3]) < 0.1 && std::abs(moments[4] - 3.0) < 0.25,
        isa + " moments of normals");

  // bfloat16: rounding, sums of rows, products by pairs.
  const std::vector<float> odd{0.0f, -0.0f, 1.0f, 1.00390625f, 1.01171875f, -3.1415927f, 3.4e38f, 1e-40f, std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(), std::nanf(""), 65504.0f, 0.1f, 1e-3f, 7.0f, -0.3f, 2.5f};
  std::vector<std::uint16_t> halves(odd.size()), drawn(odd.size());
  std::vector<float> back(odd.size());
  kern.round(odd.data(), static_cast<std::ptrdiff_t>(odd.size()), halves.data());
  kern.expand(halves.data(), static_cast<std::ptrdiff_t>(odd.size()), back.data());
  for (std::size_t i = 0; i < odd.size(); ++i)
    check(reference::to_bfloat16(odd[i]) == halves[i] && (std::isnan(odd[i]) ? std::isnan(back[i]) : std::abs(back[i]) > 3e38f || std::abs(back[i] - odd[i]) <= std::abs(odd[i]) / 256.0f + 1e-40f),
          isa + " round " + std::to_string(odd[i]));
  // 1 + 2^-9 lies a quarter of the way from 1 to the next value; what bfloat16 can hold stays.
  const std::vector<float> quarter(4001, 1.001953125f), held(4001, -1.5f);
  std::vector<std::uint16_t> ups[3], again(quarter.size());
  for (int which = 0; which < 3; ++which) {
    const std::string at = isa + " round_stochastic, draw " + std::to_string(which);
    auto& up = ups[which];
    up.resize(quarter.size());
    kern.round_stochastic(quarter.data(), 4001, 77, 5, which, up.data());
    double share = 0.0;
    for (const std::uint16_t bits : up) {
      check(bits == 0x3F80 || bits == 0x3F81, at + " goes to a neighbour");
      share += bits == 0x3F81 ? 1.0 / 4001 : 0.0;
    }
    check(std::abs(share - 0.25) < 0.03, at + ": share of ups " + std::to_string(share));
    for (int other = 0; other < which; ++other) {
      double both = 0.0;
      for (std::size_t i = 0; i < up.size(); ++i) both += up[i] == 0x3F81 && ups[other][i] == 0x3F81 ? 1.0 / 4001 : 0.0;
      check(std::abs(both - 0.0625) < 0.02, at + ": share of ups of both draws " + std::to_string(both));
    }
    kern.round_stochastic(quarter.data(), 3000, 77, 5 + 1001, which, again.data());
    check(std::equal(again.begin(), again.begin() + 3000, up.begin() + 1001), at + " depends on the unit alone");
    kern.round_stochastic(held.data(), 4001, 1, 0, which, again.data());
    check(std::all_of(again.begin(), again.end(), [](std::uint16_t b) { return b == 0xBFC0; }), at + " keeps what fits");
    kern.round_stochastic(odd.data() + 8, 3, 3, 0, which, drawn.data());
    check(drawn[0] == 0x7F80 && drawn[1] == 0xFF80 && (drawn[2] & 0x7FFF) > 0x7F80, at + " keeps infinities and NaNs");
  }
  for (const std::ptrdiff_t n : {1, 16, 31, 128}) {
    const auto width = static_cast<std::size_t>(n);
    std::vector<std::uint16_t> table(40 * width);
    for (auto& v : table) v = reference::to_bfloat16(std::normal_distribution<float>()(random));
    const std::vector<std::int32_t> ids{3, 0, 39, 3, 12, 7, 8, 9, 10, 11};
    const auto values = draw(random, ids.size()), bias = draw(random, width);
    std::vector<float> out(width);
    kern.weighted_sum_half(table.data(), n, ids.data(), values.data(), static_cast<std::ptrdiff_t>(ids.size()), bias.data(), out.data(), n);
    for (std::size_t i = 0; i < width; ++i) {
      double want = bias[i];
      for (std::size_t j = 0; j < ids.size(); ++j) want += double{values[j]} * reference::from_bfloat16(table[static_cast<std::size_t>(ids[j]) * width + i]);
      near(out[i], want, 1e-5, isa + " weighted_sum_half");
    }
  }
  for (const std::ptrdiff_t n : {1, 15, 16, 37}) {  // pairs of rows, in the place of the first of them, and back
    const auto width = static_cast<std::size_t>(n);
    for (const bool alone : {false, true}) {
      auto x = draw(random, width), y = draw(random, width);
      const auto before = x;
      std::vector<std::uint16_t> first(width), second(width);
      kern.round_pairs(x.data(), alone ? nullptr : y.data(), n, x.data());
      kern.split_pairs(x.data(), n, first.data(), second.data());
      bool same = true;
      for (std::size_t i = 0; i < width; ++i)
        same = same && first[i] == reference::to_bfloat16(before[i]) && second[i] == (alone ? 0 : reference::to_bfloat16(y[i]));
      check(same, isa + " round_pairs and split_pairs");
    }
  }
  for (int height = 1; height <= kern.mr; ++height) {
    const std::ptrdiff_t pairs = 19;
    std::vector<std::uint16_t> a(static_cast<std::size_t>(height * pairs * 2)), b(static_cast<std::size_t>(pairs * 2 * kern.nr));
    for (auto& v : a) v = reference::to_bfloat16(std::normal_distribution<float>()(random));
    for (auto& v : b) v = reference::to_bfloat16(std::normal_distribution<float>()(random));
    std::vector<float> c(static_cast<std::size_t>(height * kern.nr), 2.0f);
    std::vector<const std::uint16_t*> rows;
    for (int i = 0; i < height; ++i) rows.push_back(a.data() + i * pairs * 2);
    kern.tile_pairs(height, pairs, rows.data(), 1, b.data(), c.data(), kern.nr, true);
    for (int i = 0; i < height; ++i)
      for (int j = 0; j < kern.nr; ++j) {
        double want = 2.0;
        for (std::ptrdiff_t k = 0; k < 2 * pairs; ++k)
          want += reference::from_bfloat16(a[static_cast<std::size_t>(i * pairs * 2 + k)]) *
                  reference::from_bfloat16(b[static_cast<std::size_t>(k / 2 * 2 * kern.nr + 2 * j + k % 2)]);
        near(c[static_cast<std::size_t>(i * kern.nr + j)], want, 1e-5, isa + " tile_pairs");
      }
  }

  // The product's tile: all heights, with and without accumulation.
  for (int height = 1; height <= kern.mr; ++height) {
    const std::ptrdiff_t k = 19;
    const auto a = draw(random, static_cast<std::size_t>(height * k));
    const auto b = draw(random, static_cast<std::size_t>(k * kern.nr));
    std::vector<float> c(static_cast<std::size_t>(height * kern.nr), 2.0f);
    std::vector<const float*> rows;
    for (int i = 0; i < height; ++i) rows.push_back(a.data() + i * k);
    kern.tile(height, k, rows.data(), 1, b.data(), c.data(), kern.nr, true);
    for (int i = 0; i < height; ++i)
      for (int j = 0; j < kern.nr; ++j) {
        double want = 2.0;
        for (std::ptrdiff_t kk = 0; kk < k; ++kk) want += double{a[static_cast<std::size_t>(i * k + kk)]} * b[static_cast<std::size_t>(kk * kern.nr + j)];
        near(c[static_cast<std::size_t>(i * kern.nr + j)], want, 1e-5, isa + " tile");
      }
  }
}

// Packed matrices in the kernels in use: parts of odd sizes against sums in double.
void test_gemm() {
  std::mt19937 random(5);
  for (const std::ptrdiff_t k : {2, 18, 66})
    for (const std::ptrdiff_t n : {1, 31, 70}) {
      const std::ptrdiff_t m = 2 * kernels().mr + 3, k_begin = k > 2 ? 2 : 0, n_begin = n > kernels().nr ? kernels().nr : 0;
      const auto at = [](std::ptrdiff_t row, std::ptrdiff_t ld, std::ptrdiff_t column) { return static_cast<std::size_t>(row * ld + column); };
      auto a = draw(random, at(m, k, 0)), b = draw(random, at(n, k, 0));  // b is transposed
      std::vector<std::uint16_t> half_a(a.size()), half_b(b.size());
      for (auto [from, to] : {std::pair{&a, &half_a}, std::pair{&b, &half_b}})
        for (std::size_t i = 0; i < from->size(); ++i) {
          (*to)[i] = reference::to_bfloat16((*from)[i]);
          (*from)[i] = static_cast<float>(reference::from_bfloat16((*to)[i]));
        }
      PackedMatrix packed;
      PackedPairs pairs;
      packed.resize(k, n);
      pairs.resize(k, n);
      packed.pack_transposed(0, n, b.data(), k);
      pairs.pack_transposed(0, n, half_b.data(), k);
      std::vector<const float*> rows;
      std::vector<const std::uint16_t*> half_rows;
      for (std::ptrdiff_t i = 0; i < m; ++i) {
        rows.push_back(a.data() + at(i, k, k_begin));
        half_rows.push_back(half_a.data() + at(i, k, k_begin));
      }
      const PackedMatrix::Part part{k_begin, k, n_begin, n};
      const std::ptrdiff_t ld = whole_panels(n - n_begin);
      std::vector<float> c(at(m, ld, 0), 2.0f), half_c = c;
      std::ptrdiff_t tiles = 0;
      const Ahead ahead = [&](std::ptrdiff_t i, std::ptrdiff_t count) { check(i == tiles++ && i < count, "tiles are counted"); };
      packed.multiply(m, rows.data(), 1, part, c.data(), ld, true, &ahead);
      check(tiles == 3 * ld / kernels().nr, "each tile once");
      pairs.multiply(m, half_rows.data(), 1, part, half_c.data(), ld, true);
      for (std::ptrdiff_t i = 0; i < m; ++i)
        for (std::ptrdiff_t j = n_begin; j < n; ++j) {
          double want = 2.0;
          for (std::ptrdiff_t l = k_begin; l < k; ++l) want += double{a[at(i, k, l)]} * b[at(j, k, l)];
          near(c[at(i, ld, j - n_begin)], want, 1e-5, "PackedMatrix::multiply");
          near(half_c[at(i, ld, j - n_begin)], want, 1e-5, "PackedPairs::multiply");
        }
    }
}

struct Data {
  std::vector<std::int64_t> x_indptr{0}, y_indptr{0};
  std::vector<std::int32_t> x_indices, y_indices;
  std::vector<float> x_values;
  Csr x, y;
};

std::unique_ptr<Data> make_data(std::int64_t points, std::int64_t features, std::int64_t labels) {
  auto data = std::make_unique<Data>();
  std::mt19937 random(3);
  for (std::int64_t p = 0; p < points; ++p) {
    const std::size_t nnz = p % 7 == 0 ? 0 : 1 + random() % 9, own = p % 5 == 0 ? 0 : 1 + random() % 4;
    for (std::size_t i = 0; i < nnz; ++i) {
      data->x_indices.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(features)));
      data->x_values.push_back(0.5f + static_cast<float>(random() % 100) / 100.0f);
    }
    for (std::size_t i = 0; i < own; ++i) data->y_indices.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(labels)));
    std::sort(data->y_indices.end() - static_cast<std::ptrdiff_t>(own), data->y_indices.end());
    data->y_indices.erase(std::unique(data->y_indices.end() - static_cast<std::ptrdiff_t>(own), data->y_indices.end()), data->y_indices.end());
    data->x_indptr.push_back(static_cast<std::int64_t>(data->x_indices.size()));
    data->y_indptr.push_back(static_cast<std::int64_t>(data->y_indices.size()));
  }
  data->x = {data->x_indptr.data(), data->x_indices.data(), data->x_values.data(), points, features};
  data->y = {data->y_indptr.data(), data->y_indices.data(), nullptr, points, labels};
  data->x.check(static_cast<std::int64_t>(data->x_indices.size()), "x");
  return data;
}

// A few steps; returns all weights.
std::vector<float> train(int threads, const std::string& sampler_name, Optimizer::Kind kind, std::int64_t labels, double* loss) {
  constexpr std::int64_t kPoints = 83, kFeatures = 400, kHidden = 48;  // several runs of features
  const auto data = make_data(kPoints, kFeatures, labels);
  Pool pool(threads);
  InputConfig config;
  config.features = kFeatures;
  config.hidden_total = config.hidden_end = kHidden;
  config.slope = 0.4f;
  config.dropout = 0.25f;
  config.bias = kind != Optimizer::Kind::kAdagrad || sampler_name.find("bias") != std::string::npos;
  config.seed = 5;
  config.half = sampler_name.find("bfloat16") != std::string::npos;
  InputLayer input(pool, config);
  OutputConfig out;
  out.shard = {labels, 0, labels};
  out.hidden = kHidden;
  out.half = config.half;
  out.bias = config.bias;
  OutputLayer output(pool, out);
  Optimizer optimizer;
  optimizer.kind = kind;
  optimizer.initial_accumulator = 1e-7f;
  input.set_optimizer(optimizer);
  output.set_optimizer(optimizer);
  output.class_mean_init(data->x, data->y, config);
  std::vector<std::int64_t> counts(static_cast<std::size_t>(labels), 1);
  std::unique_ptr<Sampler> sampler;
  std::unique_ptr<LshSampler> tables;
  if (sampler_name.rfind("full", 0) == 0) {
    sampler = std::make_unique<FullSampler>(out.shard);
  } else {
    LshSampler::Config lsh;
    lsh.hash.k = 2;
    lsh.hash.l = 5;
    lsh.bucket_cap = 12;
    lsh.min_active = 6;
    lsh.top_up = 6;
    lsh.beta = 4;
    if (sampler_name == "dwta") lsh.hash.family = HashConfig::Family::kDwta;
    if (sampler_name == "wta") {
      lsh.hash.family = HashConfig::Family::kWta;
      lsh.selection = LshSampler::Selection::kVanilla;
    }
    if (sampler_name == "doph") {
      lsh.hash.family = HashConfig::Family::kDoph;
      lsh.selection = LshSampler::Selection::kTopK;
      lsh.policy = HashTables::Policy::kReservoir;
    }
    if (sampler_name == "shared union") lsh.selection = LshSampler::Selection::kThreshold;
    const bool in_batch_alone = sampler_name.rfind("in-batch", 0) == 0;
    if (!in_batch_alone) tables = std::make_unique<LshSampler>(output, lsh);
    if (in_batch_alone || sampler_name == "shared union") {
      InBatchSampler::Config in_batch;
      in_batch.num_points = kPoints;
      in_batch.batch_size = 32;
      in_batch.extras = 9;
      in_batch.log_uniform = in_batch_alone ? 0 : 9;
      sampler = std::make_unique<InBatchSampler>(out.shard, in_batch, counts.data(), tables.get());
    }
  }
  Sampler& used = sampler == nullptr ? *tables : *sampler;
  Batch batch(pool, data->x, data->y);
  for (std::uint64_t step = 0; step < 6; ++step) {
    std::vector<std::int64_t> rows;
    for (std::int64_t p = 0; p < 32; ++p) rows.push_back((static_cast<std::int64_t>(step) * 32 + p) % kPoints);
    std::vector<float> h(rows.size() * kHidden), dh(rows.size() * kHidden), lse(rows.size());
    batch.select(rows.data(), rows.size(), step);
    input.forward(batch, h.data(), true, 0, batch.size());
    output.forward(batch, h.data(), used, 0, batch.size(), lse.data());
    *loss = output.backward(batch, lse.data(), dh.data(), true, 32, 0, batch.size());
    if (threads % 2 == 0) {
      output.update(0.05f, step + 1);
    } else {  // in pieces, some of them; the next forward pass does the rest
      output.begin_update(0.05f, step + 1);
      for (std::uint64_t piece = 0; piece < step; ++piece) output.update_some();
    }
    input.backward(batch, dh.data(), 0.05f, step + 1, 0, batch.size());
    if (tables != nullptr && step == 3) {
      tables->new_functions(step);
      tables->rebuild(step);
    }
  }
  input.settle();
  output.settle();
  std::vector<float> all;
  for (WeightTable* table : {&input.weights(), &output.weights()}) {
    all.insert(all.end(), table->floats().data(), table->floats().data() + table->floats().size());
    for (std::size_t i = 0; i < table->halves().size(); ++i)
      all.push_back(static_cast<float>(reference::from_bfloat16(table->halves()[i])));
  }
  std::vector<std::int32_t> ids(7 * 5);
  std::vector<float> h(7 * kHidden, 0.3f), scores(7 * 5);
  std::vector<double> normaliser(7);
  output.topk(h.data(), 7, 5, ids.data(), scores.data(), normaliser.data());
  all.insert(all.end(), scores.begin(), scores.end());
  for (const double sum : normaliser) all.push_back(static_cast<float>(sum));
  return all;
}

void test_training() {
  for (const std::string sampler : {"full", "in-batch", "simhash", "dwta", "wta", "doph", "shared union",
                                    "full in bfloat16", "in-batch in bfloat16", "full in bfloat16 with bias"}) {
    for (const auto kind : {Optimizer::Kind::kAdagrad, Optimizer::Kind::kAdam, Optimizer::Kind::kAdamCatchUp}) {
      if (kind != Optimizer::Kind::kAdagrad && sampler.find("bfloat16") != std::string::npos) continue;
      for (const std::int64_t labels : {1, 37, 700}) {
        double loss1 = 0.0, loss = 0.0;
        const auto one = train(1, sampler, kind, labels, &loss1);
        for (const int threads : {2, 3, 4}) {
          const auto many = train(threads, sampler, kind, labels, &loss);
          const std::string name = sampler + " with " + std::to_string(labels) + " labels, " + std::to_string(threads) + " threads";
          check(one == many, name + ": not as one thread");
          check(std::isfinite(loss1) && loss1 == loss, name + ": loss");
        }
      }
    }
  }
}

// Every feature of the batch belongs to one thread, which has all its points in their order; and both shares of a point are
// its features, where the threads that make its sums have them.
void test_batch() {
  constexpr std::int64_t kPoints = 83, kFeatures = 3000;
  const auto data = make_data(kPoints, kFeatures, 5);
  std::vector<std::int64_t> rows(kPoints);
  for (std::size_t p = 0; p < rows.size(); ++p) rows[p] = static_cast<std::int64_t>(p * 7 % kPoints);
  for (const int threads : {1, 2, 3, 4, 5, 6}) {
    Pool pool(threads);
    Batch batch(pool, data->x, data->y);
    for (std::uint64_t step = 0; step < 2; ++step) batch.select(rows.data(), rows.size(), step);
    const std::string name = std::to_string(threads) + " threads: ";
    std::vector<std::vector<std::pair<std::int32_t, float>>> by_feature(rows.size()), by_share(rows.size());
    std::vector<int> owners(kFeatures, 0), shares[2] = {std::vector<int>(rows.size(), 0), std::vector<int>(rows.size(), 0)};
    for (int thread = 0; thread < threads; ++thread) {
      const Batch::Features& own = batch.features(thread);
      for (std::size_t s = 0; s < own.ids.size(); ++s) {
        ++owners[static_cast<std::size_t>(own.ids[s])];
        check(batch.units_of(thread).has(own.ids[s]), name + "another's feature");
        check(batch.feature_slot(own.ids[s]) == static_cast<std::int32_t>(s), name + "a feature's slot");
        for (std::int32_t i = own.indptr[s]; i < own.indptr[s + 1]; ++i) {
          const auto at = static_cast<std::size_t>(i);
          check(i == own.indptr[s] || own.points[at] >= own.points[at - 1], name + "a feature's points ascend");
          by_feature[static_cast<std::size_t>(own.points[at])].emplace_back(own.ids[s], own.values[at]);
        }
      }
      batch.for_shares(thread, 0, rows.size(), [&](int share, std::size_t begin, std::size_t end) {
        for (std::size_t p = begin; p < end; ++p) {
          const Batch::Features::Row row = own.row(share, p);
          ++shares[share][p];
          for (std::ptrdiff_t i = 0; i < row.count; ++i) {
            check(Batch::units_of_share(share).has(row.ids[i]), name + "the other share's feature");
            by_share[p].emplace_back(row.ids[i], row.values[i]);
          }
        }
      });
    }
    check(*std::max_element(owners.begin(), owners.end()) == 1, name + "a feature with two owners");
    for (std::size_t p = 0; p < rows.size(); ++p) {
      std::vector<std::pair<std::int32_t, float>> expected;
      for (std::int64_t i = data->x_indptr[static_cast<std::size_t>(rows[p])]; i < data->x_indptr[static_cast<std::size_t>(rows[p]) + 1]; ++i)
        expected.emplace_back(data->x_indices[static_cast<std::size_t>(i)], data->x_values[static_cast<std::size_t>(i)]);
      for (auto* found : {&expected, &by_feature[p], &by_share[p]}) std::sort(found->begin(), found->end());
      check(shares[0][p] == 1 && shares[1][p] == 1, name + "a point's share is summed once");
      check(by_feature[p] == expected && by_share[p] == expected, name + "a point's features");
    }
  }
}

void test_pool() {
  Pool pool(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> seen(1000, 0);
    pool.ranges(seen.size(), 7, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) ++seen[i];
    });
    check(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), "every element once");
  }
  bool caught = false;
  try {
    pool.run([](int thread) {
      if (thread == 2) throw std::runtime_error("from a thread");
    });
  } catch (const std::runtime_error&) {
    caught = true;
  }
  check(caught, "an exception crosses threads");
  pass_to_and_fro(pool, 100);
}

void test_wire() {
  std::mt19937 random(11);
  const auto x = draw(random, 9 * 20);
  for (const auto wire : {Wire::kFp32, Wire::kBf16, Wire::kInt8}) {
    std::vector<std::uint8_t> bytes(9 * row_bytes(wire, 13));
    std::vector<float> y(9 * 20, 0.0f);
    pack_rows(x.data(), 9, 20, 4, 17, wire, bytes.data());
    unpack_rows(bytes.data(), 9, 20, 4, 17, wire, y.data(), false);
    for (std::size_t i = 0; i < y.size(); ++i) {
      const bool inside = i % 20 >= 4 && i % 20 < 17;
      near(y[i], inside ? x[i] : 0.0, inside ? (wire == Wire::kFp32 ? 0.0 : wire == Wire::kBf16 ? 0.004 : 0.02) : 0.0, "wire");
    }
  }
}

}  // namespace

int main() {
  for (const Kernels* kern : supported_kernels()) test_kernels(*kern);
  test_gemm();
  test_pool();
  test_batch();
  test_wire();
  test_training();
  std::printf("%d checks, %d failed (%s)\n", checks, failures, kernels().name);
  return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
