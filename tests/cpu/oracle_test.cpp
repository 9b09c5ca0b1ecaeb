// The oracle against a brute-force second formulation, and its behaviour at the edges.
#include "cpu/oracle.h"

#include <gtest/gtest.h>

#include <numeric>

#include "cpu/kv_rows.h"
#include "tests/cpu/brute_force.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct OracleResult {
  std::vector<double> out, lse, value_rms, term_rms;
};

OracleResult run_oracle(const DecodeProblem& problem, const std::vector<std::int64_t>& rows) {
  const std::size_t heads = rows.size() * static_cast<std::size_t>(problem.h_q);
  constexpr double kUnwritten = -12345.0;
  OracleResult result{std::vector<double>(heads * kValueDim, kUnwritten), std::vector<double>(heads, kUnwritten),
                      std::vector<double>(heads, kUnwritten), std::vector<double>(heads * kValueDim, kUnwritten)};
  cpu::decode_oracle(problem, rows.data(), static_cast<std::int64_t>(rows.size()), result.out.data(), result.lse.data(),
                     result.value_rms.data(), result.term_rms.data());
  return result;
}

std::vector<std::int64_t> all_rows(const DecodeProblem& problem) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(problem.num_rows()));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Both sides carry at least 53 bits; what differs is the order of some hundred additions.
void expect_close(double actual, Real expected, double magnitude, const std::string& what) {
  if (std::isinf(expected)) {
    ASSERT_EQ(actual, static_cast<double>(expected)) << what;
  } else {
    ASSERT_NEAR(actual, static_cast<double>(expected), 1e-12 * (magnitude + std::fabs(static_cast<double>(expected))))
        << what;
  }
}

void expect_equals_brute_force(const DecodeProblem& problem, const std::string& name) {
  const std::vector<std::int64_t> rows = all_rows(problem);
  const OracleResult actual = run_oracle(problem, rows);
  const BruteForce brute_force(problem);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    for (int head = 0; head < problem.h_q; ++head) {
      const BruteForce::Row expected = brute_force.row(rows[n] / problem.s_q, rows[n] % problem.s_q, head);
      const std::size_t at = n * static_cast<std::size_t>(problem.h_q) + static_cast<std::size_t>(head);
      const std::string what = name + " row " + std::to_string(n) + " head " + std::to_string(head);
      expect_close(actual.lse[at], expected.lse, 10, what + " lse");
      const double rms = static_cast<double>(expected.value_rms);
      expect_close(actual.value_rms[at], expected.value_rms, rms, what + " value_rms");
      for (std::size_t c = 0; c < kValueDim; ++c) {
        expect_close(actual.out[at * kValueDim + c], expected.out[c], rms, what + " out " + std::to_string(c));
        expect_close(actual.term_rms[at * kValueDim + c], expected.term_rms[c], rms,
                     what + " term " + std::to_string(c));
      }
    }
  }
}

TEST(Oracle, EqualsBruteForceOnRandomProblems) {
  std::mt19937 random(20240607);
  const auto pick = [&](const auto& choices) { return choices[random() % std::size(choices)]; };
  constexpr auto& kFormats = kAllFormats;
  constexpr std::int64_t kPages[] = {1, 2, 61, 64};
  constexpr std::int64_t kGaps[] = {0, 16, 688};
  constexpr std::int64_t kTopks[] = {0, 1, 7, 40};
  constexpr float kScales[] = {0.0f, 1.0f / 24, -0.03f, 0.2f};
  constexpr float kValid[] = {0.0f, 0.5f, 1.0f};
  for (int trial = 0; trial < 300; ++trial) {
    ProblemShape shape;
    shape.format = kFormats[static_cast<std::size_t>(trial) % std::size(kFormats)];
    shape.b = 1 + random() % 3;
    shape.s_q = 1 + random() % 3;
    shape.h_q = 1 + static_cast<int>(random() % 5);
    shape.page_size = pick(kPages);
    shape.pages = 1 + random() % 4;
    shape.page_gap = pick(kGaps);
    shape.topk = pick(kTopks);
    shape.valid = pick(kValid);
    shape.sm_scale = pick(kScales);
    shape.lengths = random() % 2 == 0;
    shape.q_pair = trial % 5 == 0;
    shape.length_each_row = trial % 4 == 0;
    shape.sinks = random() % 2 == 0;
    if (shape.format == KvFormat::v4 && random() % 2 == 0) {
      shape.extra_pages = 1 + random() % 3;
      shape.extra_page_size = pick(kPages);
      shape.extra_topk = pick(kTopks);
    }
    const RandomProblem random_problem(shape, random());
    expect_equals_brute_force(random_problem.problem, "trial " + std::to_string(trial));
    if (HasFatalFailure()) return;
  }
}

TEST(Oracle, RowsMayBeAskedForInAnyOrderAndTwice) {
  ProblemShape shape;
  shape.b = 3;
  const RandomProblem random_problem(shape, 1);
  const std::size_t row_size = static_cast<std::size_t>(shape.h_q) * kValueDim;
  const OracleResult all = run_oracle(random_problem.problem, all_rows(random_problem.problem));
  const std::vector<std::int64_t> rows = {5, 0, 3, 3};
  const OracleResult some = run_oracle(random_problem.problem, rows);
  for (std::size_t n = 0; n < rows.size(); ++n) {
    const std::size_t row = static_cast<std::size_t>(rows[n]);
    EXPECT_TRUE(std::equal(some.out.begin() + static_cast<std::ptrdiff_t>(n * row_size),
                           some.out.begin() + static_cast<std::ptrdiff_t>((n + 1) * row_size),
                           all.out.begin() + static_cast<std::ptrdiff_t>(row * row_size)));
  }
}

TEST(Oracle, YardsticksAreOptional) {
  const RandomProblem random_problem(ProblemShape{}, 2);
  const DecodeProblem& problem = random_problem.problem;
  const OracleResult expected = run_oracle(problem, all_rows(problem));
  std::vector<double> out(expected.out.size()), lse(expected.lse.size());
  const std::vector<std::int64_t> rows = all_rows(problem);
  cpu::decode_oracle(problem, rows.data(), problem.num_rows(), out.data(), lse.data(), nullptr);
  EXPECT_EQ(out, expected.out);
  EXPECT_EQ(lse, expected.lse);
}

// Every byte that is not selected, gaps between pages included, turns into NaN codes; nothing may change.
TEST(Oracle, UnselectedBytesDoNotMatter) {
  for (const KvFormat format : {KvFormat::v32, KvFormat::v4, KvFormat::bf16}) {
    ProblemShape shape;
    shape.format = format;
    shape.b = shape.s_q = 1;
    shape.pages = 2;
    shape.page_size = 61;
    shape.page_gap = 32;
    shape.valid = 1.0f;
    RandomProblem random_problem(shape, 3);
    DecodeProblem& problem = random_problem.problem;
    const OracleResult before = run_oracle(problem, {0});

    PagedCache poisoned(format, shape.pages, shape.page_size, shape.page_gap);
    std::fill_n(poisoned.data(), shape.pages * poisoned.stride(), std::byte{0xff});
    for (std::int64_t entry = 0; entry < shape.topk; ++entry) {
      const std::int64_t slot = problem.selection.indices[entry];
      const cpu::RowBytes from = cpu::locate_row(format, problem.kv, slot);
      std::memcpy(poisoned.data() + (from.row - problem.kv.data), from.row,
                  static_cast<std::size_t>(row_stride_bytes(format)));
      if (format == KvFormat::v4) std::memcpy(poisoned.data() + (from.scales - problem.kv.data), from.scales, 7);
    }
    problem.kv = poisoned.pool();
    const OracleResult after = run_oracle(problem, {0});
    EXPECT_EQ(before.out, after.out) << format_name(format);
    EXPECT_EQ(before.lse, after.lse) << format_name(format);
  }
}

// What oracle.h says about NaN and infinity, with two selected slots of which the first is spoilt.
class OracleNonfinite : public testing::Test {
 protected:
  OracleNonfinite() : random_problem_(shape(), 4) {
    DecodeProblem& problem = random_problem_.problem;
    problem.selection = {indices_, 2, 2, 2, nullptr, 0, 0};
  }
  static ProblemShape shape() {
    ProblemShape shape;
    shape.b = shape.s_q = 1;
    shape.h_q = 1;
    return shape;
  }
  OracleResult with_rope_zero(float value) {
    const bf16_t stored = to_bf16(value);
    std::memcpy(random_problem_.cache().page(0) + 528, &stored, 2);
    return run_oracle(random_problem_.problem, {0});
  }
  // A positive q makes the score follow the sign of the stored value.
  void make_first_rope_query_positive() {
    DecodeProblem& problem = random_problem_.problem;
    q_.assign(problem.q, problem.q + v32::kKeyDim);
    q_[v32::kNopeDim] = to_bf16(1.0f);
    problem.q = q_.data();
    problem.q_rope = q_.data() + v32::kNopeDim;
  }

  std::int32_t indices_[2] = {0, 1};
  std::vector<bf16_t> q_;
  RandomProblem random_problem_;
};

TEST_F(OracleNonfinite, NanScoreMakesTheRowNan) {
  const OracleResult result = with_rope_zero(std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(std::isnan(result.lse[0]));
  for (const double value : result.out) EXPECT_TRUE(std::isnan(value));
}

TEST_F(OracleNonfinite, PositiveInfiniteScoreMakesTheRowNan) {
  make_first_rope_query_positive();
  const OracleResult result = with_rope_zero(std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(result.lse[0]));
  EXPECT_TRUE(std::isnan(result.out[0]));
}

TEST_F(OracleNonfinite, NegativeInfiniteScoreWeighsNothing) {
  make_first_rope_query_positive();
  const OracleResult result = with_rope_zero(-std::numeric_limits<float>::infinity());
  indices_[0] = -1;
  const OracleResult alone = run_oracle(random_problem_.problem, {0});
  EXPECT_EQ(result.lse, alone.lse);
  EXPECT_EQ(result.out, alone.out);
}

TEST_F(OracleNonfinite, OnlyNegativeInfiniteScoresMakeTheRowNan) {
  make_first_rope_query_positive();
  indices_[1] = -1;
  const OracleResult result = with_rope_zero(-std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(result.lse[0]));
  EXPECT_TRUE(std::isnan(result.out[0]));
}

TEST(Oracle, EmptyRowStaysZeroWhateverTheSink) {
  ProblemShape shape;
  shape.valid = 0.0f;
  shape.sinks = true;
  shape.h_q = 4;
  const RandomProblem random_problem(shape, 5);
  const OracleResult result = run_oracle(random_problem.problem, all_rows(random_problem.problem));
  for (const double value : result.out) EXPECT_EQ(value, 0.0);
  for (const double lse : result.lse) EXPECT_EQ(lse, -kInfinity);
  for (const double rms : result.value_rms) EXPECT_EQ(rms, 0.0);
  for (const double rms : result.term_rms) EXPECT_EQ(rms, 0.0);
}

}  // namespace
}  // namespace chiasma::test
