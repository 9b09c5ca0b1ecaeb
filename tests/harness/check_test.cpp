// The checker itself: right results pass, and every kind of wrong one fails.
#include "harness/check.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/kv_format.h"
#include "format/numbers.h"
#include "harness/run.h"
#include "harness/score_spread.h"
#include "harness/timing.h"

namespace chiasma::harness {
namespace {

constexpr const char* kLine =
    "decode b=2 h=4 sq=2 pool=200 topk=65 scale=amax valid=0.8 garbage=1 sink=random poison=nan layout=strided seed=3";

class CheckTest : public testing::Test {
 protected:
  void SetUp() override { start(kLine); }

  void start(const std::string& line) {
    Case spec;
    std::string error;
    ASSERT_TRUE(parse_case(line, &spec, &error)) << error;
    workload_ = Workload::make(spec, &error);
    ASSERT_NE(workload_, nullptr) << error;
    device_ = open_cpu_device();
    run();
  }

  void run() {
    RunError error;
    ASSERT_TRUE(run_case(*workload_, *device_, {}, nullptr, &error)) << error.message;
  }

  Tolerance tolerance() const { return tolerance_of(CHIASMA_CPU, workload_->spec()); }
  CheckReport report(const CheckOptions& options = {}) const { return check(*workload_, tolerance(), options); }

  bf16_t* out(std::int64_t b, std::int64_t s, std::int64_t h) const {
    const chiasma_tensor& tensor = workload_->args().out;
    return static_cast<bf16_t*>(tensor.data) + b * tensor.stride[0] + s * tensor.stride[1] + h * tensor.stride[2];
  }
  float* lse(std::int64_t b, std::int64_t s, std::int64_t h) const {
    const chiasma_tensor& tensor = workload_->args().lse;
    return static_cast<float*>(tensor.data) + b * tensor.stride[0] + s * tensor.stride[1] + h * tensor.stride[2];
  }
  float rms(const bf16_t* row) const {
    float sum = 0;
    for (int c = 0; c < kValueDim; ++c) sum += to_float(row[c]) * to_float(row[c]);
    return std::sqrt(sum / kValueDim);
  }

  void expect_failure(std::initializer_list<const char*> parts) const {
    const CheckReport result = report();
    EXPECT_FALSE(result.passed);
    for (const char* part : parts) {
      EXPECT_NE(result.failure.find(part), std::string::npos) << "'" << part << "' in: " << result.failure;
    }
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Workload> workload_;
};

TEST_F(CheckTest, RightResultPasses) {
  const CheckReport result = report();
  EXPECT_TRUE(result.passed) << result.failure;
  EXPECT_EQ(result.rows_checked, 4);
  EXPECT_EQ(result.rows_total, 4);
  // The output's rounding to bf16 cannot be avoided.
  EXPECT_GT(result.mean_relative_l2, 1e-3);
  EXPECT_LT(result.mean_relative_l2, 2e-3);
  EXPECT_LT(result.worst_element, 1.0);
}

TEST_F(CheckTest, OneElementOffFails) {
  bf16_t* row = out(1, 1, 2);
  row[77] = to_bf16(to_float(row[77]) + 0.03f * rms(row) + 0.02f * std::abs(to_float(row[77])));
  expect_failure({"b=1 s_q=1 h=2", "out["});
}

TEST_F(CheckTest, EveryElementSlightlyOffFails) {
  bf16_t* row = out(0, 1, 2);
  for (int c = 0; c < kValueDim; ++c) row[c] = to_bf16(to_float(row[c]) * 1.0025f);
  expect_failure({"b=0 s_q=1 h=2", "L2"});
}

TEST_F(CheckTest, LseOffFails) {
  float* value = lse(1, 0, 3);
  *value *= 1.0f + 4e-5f;
  expect_failure({"b=1 s_q=0 h=3", "lse = "});
}

TEST_F(CheckTest, OneNanFails) {
  out(0, 0, 1)[511] = to_bf16(std::numeric_limits<float>::quiet_NaN());
  expect_failure({"b=0 s_q=0 h=1", "out[511] = nan"});
}

TEST_F(CheckTest, InfinityFails) {
  *lse(0, 0, 0) = -std::numeric_limits<float>::infinity();
  expect_failure({"lse = -inf"});
}

TEST_F(CheckTest, SwappedHeadsFail) {
  for (int c = 0; c < kValueDim; ++c) std::swap(out(1, 0, 0)[c], out(1, 0, 2)[c]);
  expect_failure({"b=1 s_q=0 h=0", "out["});
}

TEST_F(CheckTest, SwappedQueryTokensFail) {
  for (int c = 0; c < kValueDim; ++c) std::swap(out(1, 0, 1)[c], out(1, 1, 1)[c]);
  expect_failure({"b=1 s_q=0 h=1"});
}

TEST_F(CheckTest, NothingWrittenFails) {
  workload_->reset_outputs();
  expect_failure({"b=0 s_q=0 h=0", "nan"});
}

TEST_F(CheckTest, StrayWriteFails) {
  static_cast<std::byte*>(workload_->args().lse.data)[-1] = std::byte{1};
  expect_failure({"lse", "overwritten"});
}

// A decode that reads a single slot too many must be noticed: every unselected slot is NaN.
TEST_F(CheckTest, ReadingOneUnselectedSlotIsNoticed) {
  const chiasma_tensor& cache = workload_->args().kv_cache;
  const chiasma_tensor& indices = workload_->args().indices;
  std::vector<bool> selected(static_cast<std::size_t>(cache.shape[0] * cache.shape[1]));
  for (std::int64_t row = 0; row < 4; ++row) {
    for (const std::int64_t slot : selected_slots(workload_->args(), row, false))
      selected[static_cast<std::size_t>(slot)] = true;
  }
  const auto unselected = std::find(selected.begin(), selected.end(), false) - selected.begin();
  auto* entry = static_cast<std::int32_t*>(indices.data);
  const std::int32_t before = *entry;
  *entry = static_cast<std::int32_t>(unselected);
  run();
  *entry = before;
  expect_failure({"b=0 s_q=0 h=0", "nan"});
}

TEST_F(CheckTest, OneIndexWrongIsNoticedWithoutPoison) {
  start("decode b=1 h=4 pool=200 topk=65 scale=amax");
  auto* entry = static_cast<std::int32_t*>(workload_->args().indices.data);
  const std::int32_t before = entry[64];
  entry[64] = entry[63];
  run();
  entry[64] = before;
  expect_failure({"b=0 s_q=0 h="});
}

TEST_F(CheckTest, EmptyRowsMustBeExactlyEmpty) {
  start("decode b=1 h=2 pool=200 topk=65 valid=0 sink=zero");
  EXPECT_TRUE(report().passed) << report().failure;
  out(0, 0, 1)[3] = to_bf16(1e-20f);
  expect_failure({"b=0 s_q=0 h=1", "out[3]"});
}

TEST_F(CheckTest, InfiniteSinkMustGiveExactlyZero) {
  start("decode b=1 h=2 pool=200 topk=65 scale=amax sink=inf");
  EXPECT_TRUE(report().passed) << report().failure;
  out(0, 0, 1)[3] = to_bf16(1e-20f);
  expect_failure({"b=0 s_q=0 h=1", "out[3]"});
}

// Two opposite rows of equal weight: the sum is zero and says nothing about precision, so the values' size decides.
TEST_F(CheckTest, CancellingRowsAreHeldAgainstTheirValues) {
  start("decode b=1 h=1 pool=2 page=2 topk=2 qscale=0 scale=amax");
  const auto slots = selected_slots(workload_->args(), 0, false);
  auto* page =
      static_cast<std::byte*>(workload_->args().kv_cache.data) + slots[0] / 2 * workload_->args().kv_cache.stride[0];
  std::memcpy(page + v32::kRowBytes, page, v32::kRowBytes);
  for (int c = 0; c < v32::kNopeDim; ++c) page[v32::kRowBytes + c] ^= std::byte{0x80};
  run();
  EXPECT_TRUE(report().passed) << report().failure;
  // Values are about 1: errors of a thousandth pass, of a hundredth do not.
  for (int c = 0; c < kValueDim; ++c) out(0, 0, 0)[c] = to_bf16(c % 2 == 0 ? 1e-3f : -1e-3f);
  EXPECT_TRUE(report().passed) << report().failure;
  for (int c = 0; c < kValueDim; ++c) out(0, 0, 0)[c] = to_bf16(c % 2 == 0 ? 5e-3f : -5e-3f);
  expect_failure({"L2"});
}

TEST_F(CheckTest, BoundsGrowWithTheScores) {
  start("decode b=1 h=4 pool=600 topk=301 scale=amax qscale=24");
  const ScoreSpread spread(workload_->args(), 0);
  EXPECT_NEAR(spread.deviation(0), 24.0, 4.0);
  EXPECT_EQ(spread.num_selected(), 301);
  // Four times the deviation that the bounds were made for: an lse that is off by thrice the plain bound passes.
  const float right = *lse(0, 0, 0);
  *lse(0, 0, 0) = right * (1.0f + 6e-5f);
  EXPECT_TRUE(report().passed) << report().failure;
  *lse(0, 0, 0) = right * (1.0f + 12e-5f);
  EXPECT_FALSE(report().passed);
}

TEST_F(CheckTest, BigCasesAreSampledWithTheirEnds) {
  start("decode b=50 h=1 pool=20 topk=10 scale=amax");
  CheckOptions options;
  options.max_multiply_adds = 10.0 * 10 * (576 + 512);
  const CheckReport sampled = report(options);
  EXPECT_TRUE(sampled.passed) << sampled.failure;
  EXPECT_EQ(sampled.rows_total, 50);
  EXPECT_GE(sampled.rows_checked, 8);
  EXPECT_LE(sampled.rows_checked, 10);
  for (const std::int64_t end : {0, 49}) {
    const bf16_t before = out(end, 0, 0)[0];
    out(end, 0, 0)[0] = to_bf16(100.0f);
    EXPECT_FALSE(report(options).passed) << end;
    out(end, 0, 0)[0] = before;
  }
  options.rows = {7};
  out(49, 0, 0)[0] = to_bf16(100.0f);
  EXPECT_TRUE(report(options).passed);
  EXPECT_EQ(report(options).rows_checked, 1);
}

TEST(Tolerance, IsThatOfTheDeviceAndTheFormat) {
  Case amax;
  amax.scale = CHIASMA_SCALE_AMAX;
  EXPECT_LT(tolerance_of(CHIASMA_CPU, amax).lse, tolerance_of(CHIASMA_CUDA, amax).lse);
  // bf16 rows are multiplied by bf16 probabilities.
  Case unquantised = amax;
  unquantised.fmt = CHIASMA_KV_BF16;
  EXPECT_EQ(tolerance_of(CHIASMA_CUDA, amax).probability, 0);
  EXPECT_EQ(tolerance_of(CHIASMA_CUDA, unquantised).probability, 0x1p-9);
  EXPECT_FALSE(tolerance_of(CHIASMA_CUDA, unquantised).rows_are_uneven);
  unquantised.dist = Distribution::kOutlier;
  EXPECT_TRUE(tolerance_of(CHIASMA_CUDA, unquantised).rows_are_uneven);
}

TEST(Statistics, PercentilesInterpolate) {
  const Statistics statistics = summarize({5, 1, 3, 2, 4});
  EXPECT_EQ(statistics.median, 3);
  EXPECT_EQ(statistics.min, 1);
  EXPECT_NEAR(statistics.p10, 1.4, 1e-12);
  EXPECT_NEAR(statistics.p90, 4.6, 1e-12);
  EXPECT_EQ(statistics.n, 5);
  EXPECT_EQ(summarize({}).n, 0);
}

}  // namespace
}  // namespace chiasma::harness
