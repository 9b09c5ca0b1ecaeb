// Real activations, quantised and decoded: results against the oracle by the bounds of docs/numerics.md, and apart from
// that what quantisation costs. The excerpt always; the larger file that it was cut from where the environment variable
// CHIASMA_REAL_ACTIVATIONS names it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "cli/attention_example.h"
#include "cli/real_activations.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

class RealActivations : public testing::TestWithParam<CacheKind> {
 protected:
  void check(const AttentionExample& example) {
    const RowTraits traits = traits_of(static_cast<KvFormat>(GetParam().format));
    const ExampleResult result = work_through(example, GetParam(), *harness::open_cpu_device());
    EXPECT_TRUE(result.kernel_error.passed) << result.kernel_error.failure;
    EXPECT_EQ(result.kernel_error.rows_checked, example.q_shape[0] * example.q_shape[1]);
    std::printf("kernel: relative L2 %.2e mean, %.2e max, lse %.1e; quantisation: %.2e mean, %.2e max; %.2f ms\n",
                result.kernel_error.mean_relative_l2, result.kernel_error.max_relative_l2,
                result.kernel_error.max_lse_error, result.quantisation_mean, result.quantisation_max,
                result.milliseconds);
    if (traits.is_quantized()) {
      // Rounding to e4m3's 3 mantissa bits costs a value 1/8 / sqrt(12) / sqrt(2) = 2.6 % (rms); averaging tokens, no
      // more. Rotary numbers make the largest scores of this layer, so that rounding them, too, moves weights.
      const bool rounds_rope = traits.has_rope && traits.bf16_columns == 0;
      EXPECT_LT(result.quantisation_mean, rounds_rope ? 0.08 : 0.026);
      EXPECT_GT(result.quantisation_mean, result.kernel_error.mean_relative_l2);
    } else {
      EXPECT_EQ(result.quantisation_max, 0.0);
    }
    // That the layer is peaky, unlike normally distributed data, is what makes it worth testing.
    EXPECT_GT(result.kernel_error.max_score_deviation, 3.0);
  }
};

std::vector<CacheKind> every_kind() {
  std::vector<CacheKind> kinds;
  for (const KvFormat format : kAllFormats) {
    kinds.push_back({static_cast<chiasma_kv_format>(format), CHIASMA_SCALE_POW2});
    if (traits_of(format).scale_type == ScaleType::float32) {
      kinds.push_back({static_cast<chiasma_kv_format>(format), CHIASMA_SCALE_AMAX});
    }
  }
  return kinds;
}

INSTANTIATE_TEST_SUITE_P(Kinds, RealActivations, testing::ValuesIn(every_kind()), [](const auto& kind) {
  return std::string(chiasma_kv_format_name(kind.param.format)) +
         (kind.param.scale == CHIASMA_SCALE_POW2 ? "_pow2" : "_amax");
});

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
