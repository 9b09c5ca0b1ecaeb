#include "harness/check.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "format/kv_format.h"
#include "format/numbers.h"
#include "harness/random.h"
#include "harness/score_spread.h"

namespace chiasma::harness {
namespace {

// Query tokens per call of the oracle.
constexpr std::int64_t kRowsPerCall = 8;
// Results this small may be flushed to zero by a kernel's float32 arithmetic: a sink's factor below the smallest normal
// number, times values of up to a thousand.
constexpr double kFlushed = 0x1p10 * std::numeric_limits<float>::min();

// Relative L2 error that rounding a row of unrelated values to bf16 makes.
constexpr double kUsualRounding = 1.65e-3;

// Where a result stands, for messages.
struct Place {
  std::int64_t request, query_token, head;
};

template <typename T>
const T* row_of(const chiasma_tensor& tensor, const Place& place) {
  return static_cast<const T*>(tensor.data) + place.request * tensor.stride[0] + place.query_token * tensor.stride[1] +
         place.head * tensor.stride[2];
}

// Equal, or both finite.
bool same_kind(double value, double reference) {
  if (std::isfinite(value) && std::isfinite(reference)) return true;
  return (std::isnan(value) && std::isnan(reference)) || value == reference;
}

double rms(const double* values) {
  double sum = 0;
  for (int c = 0; c < kValueDim; ++c) sum += values[c] * values[c];
  return std::sqrt(sum / kValueDim);
}

// What one row is held against. `size` is its own rms, except where the values cancel: averaging n unrelated values
// leaves 1/sqrt(n) of them, and a row far below even that says nothing about precision, so the values' rms takes over.
struct Yardstick {
  double size;
  double growth;  // >= 1: of all bounds, for scores that deviate more than the bounds were made for
};

// With e the most that a probability is off by: errors between -e and e have a standard deviation of e / sqrt(3), and
// four of e are seven of those; they are also what up to 16 equal terms can add up to.
constexpr double kProbabilityShare = 4.0;

Yardstick yardstick_of(double row_rms, double value_rms, std::int64_t num_selected, double deviation,
                       const Tolerance& tolerance) {
  constexpr double kFarBelow = 4.0;
  const double averaged = value_rms / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, num_selected)));
  return {.size = row_rms < averaged / kFarBelow ? value_rms : row_rms,
          .growth = std::max(1.0, deviation / tolerance.score_deviation)};
}

class Comparison {
 public:
  Comparison(const chiasma_decode_args& args, const Tolerance& tolerance) : args_(args), tolerance_(tolerance) {
    report_.rows_total = args.q.shape[0] * args.q.shape[1];
  }

  bool add_rows(const std::vector<std::int64_t>& rows) {
    const std::int64_t num_heads = args_.q.shape[2];
    const std::int64_t s_q = args_.q.shape[1];
    const auto num_results = rows.size() * static_cast<std::size_t>(num_heads);
    out_.resize(num_results * kValueDim);
    lse_.resize(num_results);
    value_rms_.resize(num_results);
    if (tolerance_.probability > 0) term_rms_.resize(num_results * kValueDim);
    if (chiasma_decode_oracle(&args_, rows.data(), static_cast<std::int64_t>(rows.size()), out_.data(), lse_.data(),
                              value_rms_.data(), term_rms_.empty() ? nullptr : term_rms_.data()) != CHIASMA_OK) {
      fail(fmt::format("the oracle refused the case: {}", chiasma_last_error()));
      return false;
    }
    std::size_t result = 0;
    for (const std::int64_t row : rows) {
      const ScoreSpread spread(args_, row);
      for (std::int64_t head = 0; head < num_heads; ++head, ++result) {
        const double deviation = spread.deviation(head);
        report_.max_score_deviation = std::max(report_.max_score_deviation, deviation);
        const double* out = out_.data() + result * kValueDim;
        const Yardstick yardstick =
            yardstick_of(rms(out), value_rms_[result], spread.num_selected(), deviation, tolerance_);
        const Place place = {row / s_q, row % s_q, head};
        compare_out(place, out, term_rms_.empty() ? nullptr : term_rms_.data() + result * kValueDim, yardstick);
        compare_lse(place, lse_[result], yardstick.growth);
      }
    }
    report_.rows_checked += static_cast<std::int64_t>(rows.size());
    return true;
  }

  // Batches of rows, until one fails for good.
  void add_all(const std::vector<std::int64_t>& rows) {
    for (std::size_t begin = 0; begin < rows.size(); begin += kRowsPerCall) {
      const std::size_t end = std::min(rows.size(), begin + kRowsPerCall);
      if (!add_rows(
              {rows.begin() + static_cast<std::ptrdiff_t>(begin), rows.begin() + static_cast<std::ptrdiff_t>(end)})) {
        return;
      }
    }
  }

  CheckReport finish() {
    report_.mean_relative_l2 = num_rows_ == 0 ? 0.0 : sum_relative_l2_ / static_cast<double>(num_rows_);
    report_.passed = report_.failure.empty();
    return report_;
  }

  void fail(const std::string& message) {
    if (report_.failure.empty()) report_.failure = message;
  }

 private:
  void fail_at(const Place& place, const std::string& message) {
    if (!report_.failure.empty()) return;
    report_.failure = fmt::format("b={} s_q={} h={}: {}", place.request, place.query_token, place.head, message);
  }

  // term_rms: null where probabilities are exact enough not to matter.
  void compare_out(const Place& place, const double* reference, const double* term_rms, const Yardstick& yardstick) {
    const bf16_t* out = row_of<bf16_t>(args_.out, place);
    double error_sum = 0;
    double rounding_sum = 0, term_sum = 0;
    for (int c = 0; c < kValueDim; ++c) {
      const double value = to_float(out[c]);
      if (!same_kind(value, reference[c])) {
        report_.worst_element = std::numeric_limits<double>::infinity();
        fail_at(place, fmt::format("out[{}] = {}, but the oracle has {}", c, value, reference[c]));
        return;
      }
      const double error = std::isfinite(value) ? std::abs(value - reference[c]) : 0.0;
      error_sum += error * error;
      const double rounding = to_float(to_bf16(static_cast<float>(reference[c]))) - reference[c];
      rounding_sum += std::isfinite(rounding) ? rounding * rounding : 0.0;
      const double of_value = tolerance_.out_of_value * std::abs(reference[c]);
      const double term = term_rms == nullptr ? 0.0 : tolerance_.probability * term_rms[c];
      term_sum += std::isfinite(term) ? term * term : 0.0;
      const double allowed = kFlushed + std::max(yardstick.growth * (tolerance_.out_of_rms * yardstick.size + of_value),
                                                 of_value + kProbabilityShare * term);
      report_.worst_element = std::max(report_.worst_element, error / allowed);
      if (error > allowed) {
        fail_at(place, fmt::format("out[{}] = {}, but the oracle has {}; off by {:.3g}, {:.3g} allowed", c, value,
                                   reference[c], error, allowed));
      }
    }
    compare_row(place, std::sqrt(error_sum / kValueDim), std::sqrt(rounding_sum / kValueDim),
                std::sqrt(term_sum / kValueDim), yardstick);
  }

  void compare_row(const Place& place, double error_rms, double rounding_rms, double term_rms,
                   const Yardstick& yardstick) {
    // A row of few large or of equal values can lose more by the mere rounding of its output than the bound grants.
    const double after_rounding = tolerance_.out_relative_l2 - kUsualRounding;
    const double share = tolerance_.rows_are_uneven ? kProbabilityShare : 0.0;
    const double allowed =
        std::max({tolerance_.out_relative_l2 * yardstick.growth * yardstick.size,
                  rounding_rms + after_rounding * yardstick.growth * yardstick.size + share * term_rms});
    if (error_rms > kFlushed + allowed) {
      fail_at(place, fmt::format("out is off by {:.3g} of its size in the L2 norm, {:.3g} allowed",
                                 error_rms / yardstick.size, allowed / yardstick.size));
    }
    if (yardstick.size <= kFlushed) return;
    const double relative = error_rms / yardstick.size;
    sum_relative_l2_ += relative;
    ++num_rows_;
    report_.max_relative_l2 = std::max(report_.max_relative_l2, relative);
  }

  void compare_lse(const Place& place, double reference, double growth) {
    const double value = *row_of<float>(args_.lse, place);
    if (!same_kind(value, reference)) {
      report_.max_lse_error = report_.worst_lse = std::numeric_limits<double>::infinity();
      fail_at(place, fmt::format("lse = {}, but the oracle has {}", value, reference));
      return;
    }
    if (!std::isfinite(reference)) return;
    const double error = std::abs(value - reference) / std::max(1.0, std::abs(reference));
    report_.max_lse_error = std::max(report_.max_lse_error, error);
    const double allowed = tolerance_.lse * growth;
    report_.worst_lse = std::max(report_.worst_lse, error / allowed);
    if (error > allowed) {
      fail_at(place, fmt::format("lse = {}, but the oracle has {}; relative error {:.3g}, {:.3g} allowed", value,
                                 reference, error, allowed));
    }
  }

  const chiasma_decode_args& args_;
  const Tolerance& tolerance_;
  CheckReport report_;
  double sum_relative_l2_ = 0;
  std::int64_t num_rows_ = 0;  // that enter the mean
  std::vector<double> out_, lse_, value_rms_, term_rms_;
};

std::vector<std::int64_t> choose_rows(const Case& spec, const CheckOptions& options) {
  if (!options.rows.empty()) return options.rows;
  constexpr std::uint64_t kSampleKey = 7;
  const std::int64_t total = spec.num_rows();
  const double affordable =
      std::max(2.0, options.max_multiply_adds * static_cast<double>(total) / std::max(1.0, spec.multiply_adds()));
  std::vector<std::int64_t> rows;
  if (affordable >= static_cast<double>(total)) {
    for (std::int64_t row = 0; row < total; ++row) rows.push_back(row);
    return rows;
  }
  rows = {0, total - 1};
  const std::uint64_t key = derive(spec.seed, kSampleKey);
  for (std::uint64_t n = 0; n + 2 < static_cast<std::uint64_t>(affordable); ++n) {
    rows.push_back(static_cast<std::int64_t>(permute(n, static_cast<std::uint64_t>(total), key)));
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

}  // namespace

Tolerance tolerance_of(chiasma_device_kind device, const Case& spec) {
  constexpr double kOutOfRms = 1e-2;
  constexpr double kOutOfValue = 0x1p-8;
  if (device == CHIASMA_CPU) return {"cpu", 2.2e-3, kOutOfRms, kOutOfValue, 2e-5, 6.0};
  if (spec.fmt == CHIASMA_KV_BF16 || spec.fmt == CHIASMA_KV_BF16_NOPE) {
    // With values of very different sizes a row may be made up of roundings.
    const bool is_uneven = spec.dist == Distribution::kOutlier || spec.dist == Distribution::kExtreme;
    return {"gpu, probabilities in bf16", 4e-3, kOutOfRms, kOutOfValue, 5e-4, 6.0, 0x1p-9, is_uneven};
  }
  return {"gpu", 2.2e-3, kOutOfRms, kOutOfValue, 5e-4, 6.0};
}

CheckReport check(const Workload& workload, const Tolerance& tolerance, const CheckOptions& options) {
  Comparison comparison(workload.args(), tolerance);
  comparison.add_all(choose_rows(workload.spec(), options));
  std::string where;
  if (!workload.guards_intact(&where)) comparison.fail(where);
  return comparison.finish();
}

CheckReport check_decode(const chiasma_decode_args& args, const Tolerance& tolerance) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(args.q.shape[0] * args.q.shape[1]));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  Comparison comparison(args, tolerance);
  comparison.add_all(rows);
  return comparison.finish();
}

}  // namespace chiasma::harness
