// Runs cpu::run_decode on a problem with outputs and scratch memory that show every stray write, and compares the
// results with the oracle's.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "api/status.h"
#include "cpu/decode.h"
#include "cpu/oracle.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {

// Results without gaps, [b, s_q, h_q, 512] and [b, s_q, h_q].
struct DecodeResult {
  std::vector<bf16_t> out;
  std::vector<float> lse;
};

inline bool same_bits(const DecodeResult& a, const DecodeResult& b) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
  };
  return equal(a.out, b.out) && equal(a.lse, b.lse);
}

// A buffer aligned to 64 bytes, full of NaN, with a guard behind it.
class GuardedScratch {
 public:
  explicit GuardedScratch(std::size_t bytes) : bytes_(bytes), lines_((bytes + 63) / 64 + kGuardLines) {
    for (Line& line : lines_) std::fill(line.bytes, line.bytes + 64, kFill);
  }
  void* data() { return lines_.data(); }
  bool guard_intact() const {
    const auto* begin = reinterpret_cast<const std::byte*>(lines_.data());
    return std::all_of(begin + bytes_, begin + lines_.size() * sizeof(Line), [](std::byte b) { return b == kFill; });
  }

 private:
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  static constexpr std::byte kFill{0xff};
  static constexpr std::size_t kGuardLines = 4;
  std::size_t bytes_;
  std::vector<Line> lines_;
};

// Points the problem's outputs at a strided buffer full of a pattern; afterwards everything between must still hold it.
class StridedOutputs {
 public:
  explicit StridedOutputs(DecodeProblem& problem) : problem_(problem) {
    problem.out_stride_h = kValueDim + 8;
    problem.out_stride_s = problem.out_stride_h * problem.h_q + 16;
    problem.out_stride_b = problem.out_stride_s * problem.s_q + 24;
    problem.lse_stride_h = 2;
    problem.lse_stride_s = 2 * problem.h_q + 1;
    problem.lse_stride_b = problem.lse_stride_s * problem.s_q + 3;
    out_.assign(static_cast<std::size_t>(problem.out_stride_b * problem.b + kMargin), kOutPattern);
    lse_.assign(static_cast<std::size_t>(problem.lse_stride_b * problem.b + kMargin), kLsePattern);
    problem.out = out_.data();
    problem.lse = lse_.data();
  }

  // Takes the results out, leaving the pattern in their places, so that one look at the whole buffer shows stray
  // writes.
  DecodeResult take() {
    DecodeResult result;
    for (std::int64_t i = 0; i < problem_.b; ++i) {
      for (std::int64_t s = 0; s < problem_.s_q; ++s) {
        for (int h = 0; h < problem_.h_q; ++h) {
          bf16_t* out =
              problem_.out + i * problem_.out_stride_b + s * problem_.out_stride_s + h * problem_.out_stride_h;
          result.out.insert(result.out.end(), out, out + kValueDim);
          std::fill_n(out, kValueDim, kOutPattern);
          float* lse = problem_.lse + i * problem_.lse_stride_b + s * problem_.lse_stride_s + h * problem_.lse_stride_h;
          result.lse.push_back(*lse);
          *lse = kLsePattern;
        }
      }
    }
    EXPECT_TRUE(std::all_of(out_.begin(), out_.end(), [](bf16_t x) { return x == kOutPattern; }));
    EXPECT_TRUE(std::all_of(lse_.begin(), lse_.end(), [](float x) { return x == kLsePattern; }));
    return result;
  }

 private:
  static constexpr bf16_t kOutPattern{0xabcd};
  static constexpr float kLsePattern = -12345.0f;
  static constexpr std::int64_t kMargin = 64;
  DecodeProblem& problem_;
  std::vector<bf16_t> out_;
  std::vector<float> lse_;
};

inline DecodeResult decode(DecodeProblem problem, int num_splits = 0, int num_threads = 2) {
  const cpu::DecodeSchedule schedule = cpu::schedule_decode(problem, num_splits, num_threads);
  GuardedScratch scratch(schedule.workspace_bytes);
  StridedOutputs outputs(problem);
  cpu::run_decode(problem, schedule, scratch.data());
  EXPECT_TRUE(scratch.guard_intact());
  return outputs.take();
}

struct OracleResult {
  std::vector<double> out, lse, value_rms;
};

inline OracleResult oracle(const DecodeProblem& problem) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(problem.num_rows()));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  const std::size_t heads = rows.size() * static_cast<std::size_t>(problem.h_q);
  OracleResult result{std::vector<double>(heads * kValueDim), std::vector<double>(heads), std::vector<double>(heads)};
  cpu::decode_oracle(problem, rows.data(), problem.num_rows(), result.out.data(), result.lse.data(),
                     result.value_rms.data());
  return result;
}

inline bool same_class(double value, double reference) {
  if (std::isnan(reference)) return std::isnan(value);
  if (std::isinf(reference)) return value == reference;
  return std::isfinite(value);
}

// The bounds of docs/numerics.md for the CPU, for one head; empty when they hold. The one on the L2 norm is tighter
// here: what rounding the reference to bf16 costs (up to 2.3e-3 of a row whose few large values lie just above a power
// of two) and 1e-4 more.
inline std::string compare_head(const bf16_t* out, float lse, const double* reference, double reference_lse,
                                double value_rms) {
  if (!same_class(lse, reference_lse)) return concat("lse ", lse, " instead of ", reference_lse);
  if (std::isfinite(reference_lse) && std::abs(lse - reference_lse) > 2e-5 * std::max(1.0, std::abs(reference_lse))) {
    return concat("lse ", lse, " instead of ", reference_lse);
  }
  double square = 0.0, error = 0.0, rounding = 0.0;
  for (int c = 0; c < kValueDim; ++c) {
    if (!same_class(to_float(out[c]), reference[c])) {
      return concat("out[", c, "] ", to_float(out[c]), " instead of ", reference[c]);
    }
    if (!std::isfinite(reference[c])) continue;
    square += reference[c] * reference[c];
    error += (to_float(out[c]) - reference[c]) * (to_float(out[c]) - reference[c]);
    const double rounded = to_float(to_bf16(static_cast<float>(reference[c])));
    rounding += (rounded - reference[c]) * (rounded - reference[c]);
  }
  // A row whose values cancel is judged by the size of the values.
  double rms = std::sqrt(square / kValueDim);
  if (rms < 1e-3 * value_rms) rms = value_rms;
  if (std::sqrt(error / kValueDim) > std::sqrt(rounding / kValueDim) + 1e-4 * rms) {
    return concat("relative L2 ", std::sqrt(error / kValueDim) / rms);
  }
  for (int c = 0; c < kValueDim; ++c) {
    if (!std::isfinite(reference[c])) continue;
    const double allowed = 1e-2 * rms + std::abs(reference[c]) / 256.0;
    if (std::abs(to_float(out[c]) - reference[c]) > allowed) {
      return concat("out[", c, "] ", to_float(out[c]), " instead of ", reference[c]);
    }
  }
  return {};
}

inline void expect_near(const DecodeResult& result, const OracleResult& reference) {
  ASSERT_EQ(result.lse.size(), reference.lse.size());
  ASSERT_EQ(result.out.size(), reference.out.size());
  for (std::size_t i = 0; i < result.lse.size(); ++i) {
    const std::string difference =
        compare_head(result.out.data() + i * kValueDim, result.lse[i], reference.out.data() + i * kValueDim,
                     reference.lse[i], reference.value_rms[i]);
    ASSERT_EQ(difference, "") << "row and head " << i;
  }
}

inline void expect_matches_oracle(const DecodeProblem& problem, int num_splits = 0, int num_threads = 2) {
  expect_near(decode(problem, num_splits, num_threads), oracle(problem));
}

}  // namespace chiasma::test
