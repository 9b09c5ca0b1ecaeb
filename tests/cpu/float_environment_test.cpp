// Host programs change the floating-point environment: denormal numbers to zero, another rounding. Results stay, and so
// does the caller's environment.
#include <gtest/gtest.h>

#include <cfenv>
#include <cstring>
#include <thread>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "cpu/cache_ops.h"
#include "tests/cpu/decode_run.h"
#include "tests/cpu/paged_cache.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {
namespace {

// Rounds up; on x86 takes denormal numbers for zero, too. As words that are equal when nothing has changed since.
std::vector<unsigned> current_environment() {
  std::vector<unsigned> words{static_cast<unsigned>(std::fegetround())};
#if defined(__SSE__)
  words.push_back(_mm_getcsr());
#endif
  return words;
}
void change_environment() {
  std::fesetround(FE_UPWARD);
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040u);  // flush to zero, denormals are zero
#endif
}

// In a thread of its own, so that the whole team of that thread begins in the changed environment.
template <typename Work>
void elsewhere(Work&& work) {
  std::thread([&] {
    change_environment();
    const std::vector<unsigned> before = current_environment();
    work();
    EXPECT_EQ(current_environment(), before);
  }).join();
}

// A v32 problem whose scales are all denormal, with scores of the usual size.
RandomProblem denormal_problem(std::int64_t b) {
  ProblemShape shape;
  shape.format = KvFormat::v32;
  shape.b = b;
  shape.h_q = 16;
  shape.topk = b == 1 ? 1500 : 100;
  shape.pages = 41;
  shape.page_size = 7;
  shape.sm_scale = 1e36f;
  return RandomProblem(shape, 3);
}
void make_scales_denormal(const KvPool& pool) {
  for (std::int64_t slot = 0; slot < pool.num_slots(); ++slot) {
    const std::byte* row =
        pool.data + slot / pool.page_size * pool.page_stride_bytes + slot % pool.page_size * v32::kRowBytes;
    const float scales[v32::kNumTiles] = {1e-39f, 3e-39f, 2e-40f, 1e-39f};
    std::memcpy(const_cast<std::byte*>(row) + v32::kScalesOffset, scales, sizeof scales);
    std::memset(const_cast<std::byte*>(row) + v32::kRopeOffset, 0, v32::kRowBytes - v32::kRopeOffset);
  }
}

TEST(FloatEnvironment, DecodeAndOracleKeepTheirBits) {
  for (const std::int64_t b : {1, 40}) {  // threads share a row, and take whole rows
    const RandomProblem random = denormal_problem(b);
    make_scales_denormal(random.problem.kv);
    const DecodeResult expected = decode(random.problem, 0, 2);
    const std::vector<double> exact = oracle(random.problem).out;
    EXPECT_GT(*std::ranges::max_element(exact), 0.0);
    elsewhere([&] {
      EXPECT_TRUE(same_bits(decode(random.problem, 0, 2), expected)) << "b " << b;
      EXPECT_EQ(oracle(random.problem).out, exact);
    });
  }
}

TEST(FloatEnvironment, QuantiserKeepsItsBytes) {
  constexpr std::int64_t kPages = 8, kPage = 64;
  std::vector<bf16_t> kv(static_cast<std::size_t>(kPages * kPage * v32::kKeyDim));
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = {static_cast<std::uint16_t>(i * 40503u % 0x7f00u)};
  PagedCache caches[] = {{KvFormat::v32, kPages, kPage}, {KvFormat::v32, kPages, kPage}};
  const auto quantize_into = [&](PagedCache& cache) {
    QuantizeProblem problem{};
    problem.format = KvFormat::v32;
    problem.scale = ScaleMode::amax;
    problem.tokens = kPages * kPage;
    problem.kv = kv.data();
    problem.kv_stride = v32::kKeyDim;
    problem.rope = kv.data() + v32::kNopeDim;
    problem.rope_stride = v32::kKeyDim;
    problem.pool = cache.pool();
    problem.cache = cache.data();
    cpu::quantize(problem);
  };
  quantize_into(caches[0]);
  elsewhere([&] { quantize_into(caches[1]); });
  EXPECT_EQ(std::memcmp(caches[0].data(), caches[1].data(), static_cast<std::size_t>(kPages * caches[0].stride())), 0);
}

}  // namespace
}  // namespace chiasma::test
