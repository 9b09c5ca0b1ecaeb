// Real activations, quantised and decoded: results against the oracle by the bounds of docs/numerics.md, and apart from
// that what quantisation costs. The excerpt always; the larger file that it was cut from where the environment variable
// CHIASMA_REAL_ACTIVATIONS names it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "cli/attention_example.h"
#include "cli/real_activations.h"

namespace chiasma::cli {
namespace {

class RealActivations : public testing::TestWithParam<chiasma_scale_mode> {
 protected:
  void check(const AttentionExample& example) {
    const ExampleResult result = work_through(example, GetParam(), *harness::open_cpu_device());
    EXPECT_TRUE(result.kernel_error.passed) << result.kernel_error.failure;
    EXPECT_EQ(result.kernel_error.rows_checked, example.q_shape[0] * example.q_shape[1]);
    std::printf("kernel: relative L2 %.2e mean, %.2e max, lse %.1e; quantisation: %.2e mean, %.2e max; %.2f ms\n",
                result.kernel_error.mean_relative_l2, result.kernel_error.max_relative_l2,
                result.kernel_error.max_lse_error, result.quantisation_mean, result.quantisation_max,
                result.milliseconds);
    // Rounding to e4m3's 3 mantissa bits costs a value 1/8 / sqrt(12) / sqrt(2) = 2.6 % (rms); averaging tokens, no
    // more.
    EXPECT_LT(result.quantisation_mean, 0.026);
    EXPECT_GT(result.quantisation_mean, result.kernel_error.mean_relative_l2);
    // That the layer is peaky, unlike normally distributed data, is what makes it worth testing.
    EXPECT_GT(result.kernel_error.max_score_deviation, 3.0);
  }
};

INSTANTIATE_TEST_SUITE_P(Scales, RealActivations, testing::Values(CHIASMA_SCALE_POW2, CHIASMA_SCALE_AMAX),
                         [](const auto& scale) { return scale.param == CHIASMA_SCALE_POW2 ? "pow2" : "amax"; });

TEST_P(RealActivations, ExcerptIsDecodedWithinTolerance) {
  check(real_example());
}

TEST_P(RealActivations, WholeFileIsDecodedWithinTolerance) {
  const char* path = std::getenv("CHIASMA_REAL_ACTIVATIONS");
  if (path == nullptr) GTEST_SKIP() << "CHIASMA_REAL_ACTIVATIONS is not set; the excerpt alone was tested";
  check(load_example(SafetensorsFile::open(path), "whole"));
}

TEST(EmbeddedActivations, AreTheFile) {
  std::ifstream file(CHIASMA_SOURCE_DIR "/examples/real_activations.safetensors", std::ios::binary);
  const std::vector<char> expected{std::istreambuf_iterator<char>(file), {}};
  const std::span<const std::byte> embedded = real_activations();
  ASSERT_LT(embedded.size(), 1'000'000u);
  ASSERT_EQ(embedded.size(), expected.size());
  EXPECT_EQ(std::memcmp(embedded.data(), expected.data(), expected.size()), 0);
}

}  // namespace
}  // namespace chiasma::cli
