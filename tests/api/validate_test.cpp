// Every rule of chiasma.h about arguments: one line bends one thing, and the message must name the argument, its value
// and what is allowed.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/api/problem_fixture.h"

namespace chiasma::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct BadCall {
  const char* name;
  std::function<void(SmallProblem&)> bend;
  chiasma_status status;
  std::vector<const char*> message_has;
};

std::ostream& operator<<(std::ostream& stream, const BadCall& call) {
  return stream << call.name;
}

void set_shape(chiasma_tensor& tensor, int dim, std::int64_t extent) {
  tensor.shape[dim] = extent;
}

chiasma_tensor shape_only(chiasma_dtype dtype, std::initializer_list<std::int64_t> shape) {
  return tensor(nullptr, dtype, kCpu, shape);
}

// The query without its rotary columns, and those in a tensor of the given shape.
void split_query(SmallProblem& problem, std::initializer_list<std::int64_t> rope_shape) {
  set_shape(problem.args.q, 3, 512);
  problem.args.q_rope = shape_only(CHIASMA_BFLOAT16, rope_shape);
}

const std::vector<BadCall> kBadShapes = {
    {"format",
     [](SmallProblem& p) { p.args.format = static_cast<chiasma_kv_format>(99); },
     CHIASMA_INVALID_ARGUMENT,
     {"format is 99", "v32 (1)"}},
    {"kv_scale_beside_tile_scales",
     [](SmallProblem& p) { p.args.kv_scale = 0.5; },
     CHIASMA_INVALID_ARGUMENT,
     {"kv_scale is 0.5", "v32"}},
    {"kv_scale_nan",
     [](SmallProblem& p) {
       p.args.format = CHIASMA_KV_FP8;
       p.args.kv_cache = shape_only(CHIASMA_UINT8, {4, 8, 576});
       p.args.kv_scale = std::nan("");
     },
     CHIASMA_INVALID_ARGUMENT,
     {"kv_scale is nan", "positive"}},
    {"q_rope_without_rotary_columns",
     [](SmallProblem& p) {
       p.args.format = CHIASMA_KV_V32_NOPE;
       set_shape(p.args.q, 3, 448);
       p.args.q_rope = shape_only(CHIASMA_BFLOAT16, {2, 3, 4, 64});
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q_rope is given", "v32nope"}},
    {"scale_nan",
     [](SmallProblem& p) { p.args.sm_scale = std::nan(""); },
     CHIASMA_INVALID_ARGUMENT,
     {"sm_scale is nan", "finite"}},
    {"scale_inf", [](SmallProblem& p) { p.args.sm_scale = -kInf; }, CHIASMA_INVALID_ARGUMENT, {"sm_scale is -inf"}},
    {"scale_beyond_float",
     [](SmallProblem& p) { p.args.sm_scale = 1e300; },
     CHIASMA_INVALID_ARGUMENT,
     {"sm_scale is 1e+300", "float32"}},
    {"q_absent", [](SmallProblem& p) { p.args.q = {}; }, CHIASMA_INVALID_ARGUMENT, {"q is absent"}},
    {"q_rank",
     [](SmallProblem& p) { p.args.q.rank = 3; },
     CHIASMA_INVALID_ARGUMENT,
     {"q has rank 3", "[b, s_q, h_q, d_qk]"}},
    {"q_rank_huge",
     [](SmallProblem& p) { p.args.q.rank = 1 << 30; },
     CHIASMA_INVALID_ARGUMENT,
     {"q has rank 1073741824"}},
    {"q_dtype",
     [](SmallProblem& p) { p.args.q.dtype = CHIASMA_FLOAT32; },
     CHIASMA_INVALID_ARGUMENT,
     {"q has dtype float32", "bfloat16"}},
    {"q_dtype_unknown",
     [](SmallProblem& p) { p.args.q.dtype = static_cast<chiasma_dtype>(77); },
     CHIASMA_INVALID_ARGUMENT,
     {"unknown (77)"}},
    {"q_width",
     [](SmallProblem& p) { set_shape(p.args.q, 3, 512); },
     CHIASMA_INVALID_ARGUMENT,
     {"[2, 3, 4, 512]", "must be 576"}},
    {"q_negative_extent",
     [](SmallProblem& p) { set_shape(p.args.q, 0, -1); },
     CHIASMA_INVALID_ARGUMENT,
     {"q has shape [-1, 3, 4, 576]", ">= 0"}},
    {"q_no_heads",
     [](SmallProblem& p) { set_shape(p.args.q, 2, 0); },
     CHIASMA_INVALID_ARGUMENT,
     {"h_q = 0", "1 to 128"}},
    {"q_129_heads", [](SmallProblem& p) { set_shape(p.args.q, 2, 129); }, CHIASMA_INVALID_ARGUMENT, {"h_q = 129"}},
    {"q_last_strided",
     [](SmallProblem& p) { p.args.q.stride[3] = 2; },
     CHIASMA_INVALID_ARGUMENT,
     {"q has stride(3) = 2", "contiguous"}},
    {"q_negative_stride",
     [](SmallProblem& p) { p.args.q.stride[0] = -576; },
     CHIASMA_INVALID_ARGUMENT,
     {"q has stride(0) = -576", ">= 0"}},
    {"q_stride_overflow",
     [](SmallProblem& p) { p.args.q.stride[0] = std::numeric_limits<std::int64_t>::max(); },
     CHIASMA_INVALID_ARGUMENT,
     {"q with shape", "64 bits"}},
    {"q_extent_overflow",
     [](SmallProblem& p) {
       set_shape(p.args.q, 0, std::int64_t{1} << 60);
       set_shape(p.args.q, 1, std::int64_t{1} << 60);
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q with shape", "64 bits"}},
    {"q_device_kind",
     [](SmallProblem& p) { p.args.q.device.kind = static_cast<chiasma_device_kind>(5); },
     CHIASMA_INVALID_ARGUMENT,
     {"unknown device kind 5"}},
    {"cache_absent", [](SmallProblem& p) { p.args.kv_cache = {}; }, CHIASMA_INVALID_ARGUMENT, {"kv_cache is absent"}},
    {"cache_dtype",
     [](SmallProblem& p) { p.args.kv_cache.dtype = CHIASMA_BFLOAT16; },
     CHIASMA_INVALID_ARGUMENT,
     {"kv_cache has dtype bfloat16", "uint8"}},
    {"cache_row_bytes",
     [](SmallProblem& p) { set_shape(p.args.kv_cache, 2, 584); },
     CHIASMA_INVALID_ARGUMENT,
     {"kv_cache has shape [4, 8, 584]", "656"}},
    {"cache_page_0",
     [](SmallProblem& p) { set_shape(p.args.kv_cache, 1, 0); },
     CHIASMA_INVALID_ARGUMENT,
     {"page size of 0"}},
    {"cache_rows_apart",
     [](SmallProblem& p) { p.args.kv_cache.stride[1] = 672; },
     CHIASMA_INVALID_ARGUMENT,
     {"stride(1) = 672", "656"}},
    {"cache_page_stride_odd_on_cuda",
     [](SmallProblem& p) {
       p.args.kv_cache.stride[0] += 8;
       p.args.kv_cache.device = cuda_device(0);
     },
     CHIASMA_INVALID_ARGUMENT,
     {"page stride of 5256", "multiple of 16 on a CUDA device"}},
    {"cache_page_stride_short",
     [](SmallProblem& p) { p.args.kv_cache.stride[0] -= 16; },
     CHIASMA_INVALID_ARGUMENT,
     {"page stride of 5232", "at least 5248"}},
    {"cache_on_another_cpu",
     [](SmallProblem& p) { p.args.kv_cache.device.index = 2; },
     CHIASMA_INVALID_ARGUMENT,
     {"kv_cache is on cpu:2", "q is on cpu;"}},
    {"cache_on_cuda",
     [](SmallProblem& p) { p.args.kv_cache.device = cuda_device(1); },
     CHIASMA_INVALID_ARGUMENT,
     {"kv_cache is on cuda:1", "q is on cpu"}},
    {"indices_absent", [](SmallProblem& p) { p.args.indices = {}; }, CHIASMA_INVALID_ARGUMENT, {"indices is absent"}},
    {"indices_int64",
     [](SmallProblem& p) { p.args.indices.dtype = CHIASMA_INT64; },
     CHIASMA_INVALID_ARGUMENT,
     {"indices has dtype int64", "int32"}},
    {"indices_rows",
     [](SmallProblem& p) { set_shape(p.args.indices, 1, 2); },
     CHIASMA_INVALID_ARGUMENT,
     {"indices has shape [2, 2, 5]", "extent 1", "must be 3"}},
    {"indices_last_strided",
     [](SmallProblem& p) { p.args.indices.stride[2] = 2; },
     CHIASMA_INVALID_ARGUMENT,
     {"indices has stride(2) = 2"}},
    {"topk_beyond_int32",
     [](SmallProblem& p) { set_shape(p.args.indices, 2, std::int64_t{1} << 31); },
     CHIASMA_INVALID_ARGUMENT,
     {"topk = 2147483648"}},
    {"length_extent",
     [](SmallProblem& p) { set_shape(p.args.topk_length, 0, 3); },
     CHIASMA_INVALID_ARGUMENT,
     {"topk_length has shape [3]", "must be 2"}},
    {"length_extent_of_query_tokens",
     [](SmallProblem& p) {
       p.args.topk_length = shape_only(CHIASMA_INT32, {2, 4});
     },
     CHIASMA_INVALID_ARGUMENT,
     {"topk_length has shape [2, 4]", "[b, s_q] must be 3"}},
    {"length_rank",
     [](SmallProblem& p) {
       p.args.topk_length = shape_only(CHIASMA_INT32, {2, 3, 1});
     },
     CHIASMA_INVALID_ARGUMENT,
     {"topk_length has rank 3", "[b] or [b, s_q]"}},
    {"q_rope_beside_whole_q",
     [](SmallProblem& p) {
       p.args.q_rope = shape_only(CHIASMA_BFLOAT16, {2, 3, 4, 64});
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q has shape [2, 3, 4, 576]", "as q_rope is given", "must be 512"}},
    {"q_rope_width",
     [](SmallProblem& p) {
       split_query(p, {2, 3, 4, 63});
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q_rope has shape [2, 3, 4, 63]", "must be 64"}},
    {"q_rope_heads",
     [](SmallProblem& p) {
       split_query(p, {2, 3, 5, 64});
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q_rope has shape [2, 3, 5, 64]", "must be 4"}},
    {"q_rope_last_strided",
     [](SmallProblem& p) {
       split_query(p, {2, 3, 4, 64});
       p.args.q_rope.stride[3] = 2;
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q_rope has stride(3) = 2", "contiguous"}},
    {"q_rope_dtype",
     [](SmallProblem& p) {
       split_query(p, {2, 3, 4, 64});
       p.args.q_rope.dtype = CHIASMA_FLOAT32;
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q_rope has dtype float32", "bfloat16"}},
    {"q_rope_on_cuda",
     [](SmallProblem& p) {
       split_query(p, {2, 3, 4, 64});
       p.args.q_rope.device = cuda_device(0);
     },
     CHIASMA_INVALID_ARGUMENT,
     {"q_rope is on cuda:0", "q is on cpu"}},
    {"sink_extent",
     [](SmallProblem& p) { set_shape(p.args.attn_sink, 0, 5); },
     CHIASMA_INVALID_ARGUMENT,
     {"attn_sink has shape [5]", "must be 4"}},
    {"sink_dtype",
     [](SmallProblem& p) { p.args.attn_sink.dtype = CHIASMA_BFLOAT16; },
     CHIASMA_INVALID_ARGUMENT,
     {"attn_sink has dtype bfloat16"}},
    {"extra_not_v4",
     [](SmallProblem& p) { p.args.extra_kv_cache = p.args.kv_cache; },
     CHIASMA_INVALID_ARGUMENT,
     {"extra_kv_cache is given with format v32", "only v4"}},
    {"extra_orphan",
     [](SmallProblem& p) { p.args.extra_indices = p.args.indices; },
     CHIASMA_INVALID_ARGUMENT,
     {"extra_indices is given, but extra_kv_cache is absent"}},
    {"out_absent", [](SmallProblem& p) { p.args.out = {}; }, CHIASMA_INVALID_ARGUMENT, {"out is absent"}},
    {"out_shape",
     [](SmallProblem& p) { set_shape(p.args.out, 3, 576); },
     CHIASMA_INVALID_ARGUMENT,
     {"out has shape [2, 3, 4, 576]", "must be 512"}},
    {"out_overlaps_itself",
     [](SmallProblem& p) { p.args.out.stride[1] = 512; },
     CHIASMA_INVALID_ARGUMENT,
     {"out with shape", "overlap"}},
    {"out_broadcast", [](SmallProblem& p) { p.args.out.stride[0] = 0; }, CHIASMA_INVALID_ARGUMENT, {"stride of 0"}},
    {"lse_dtype",
     [](SmallProblem& p) { p.args.lse.dtype = CHIASMA_FLOAT64; },
     CHIASMA_INVALID_ARGUMENT,
     {"lse has dtype float64", "float32"}},
    {"lse_absent", [](SmallProblem& p) { p.args.lse = {}; }, CHIASMA_INVALID_ARGUMENT, {"lse is absent"}},
};

const std::vector<BadCall> kBadData = {
    {"q_null", [](SmallProblem& p) { p.args.q.data = nullptr; }, CHIASMA_INVALID_ARGUMENT, {"q has shape", "NULL"}},
    {"indices_unaligned",
     [](SmallProblem& p) { p.args.indices.data = reinterpret_cast<std::uint8_t*>(p.indices.data()) + 2; },
     CHIASMA_INVALID_ARGUMENT,
     {"indices starts at address", "multiple of 4"}},
    {"out_is_q",
     [](SmallProblem& p) { p.args.out.data = p.args.q.data; },
     CHIASMA_INVALID_ARGUMENT,
     {"out at", "overlaps q"}},
    {"lse_inside_out",
     [](SmallProblem& p) { p.args.lse.data = p.out.data() + 64; },
     CHIASMA_INVALID_ARGUMENT,
     {"lse at", "overlaps out"}},
};

void expect_refused(chiasma_status status, const BadCall& call) {
  EXPECT_EQ(status, call.status) << chiasma_last_error();
  for (const char* part : call.message_has)
    EXPECT_NE(std::string(chiasma_last_error()).find(part), std::string::npos)
        << "missing '" << part << "' in: " << chiasma_last_error();
}

class BadShape : public testing::TestWithParam<BadCall> {};

TEST_P(BadShape, IsRefusedByPlanRunAndCheckAlike) {
  SmallProblem problem;
  const DecodePlan good(problem.args);
  HostWorkspace workspace(good.workspace_bytes());
  GetParam().bend(problem);
  chiasma_decode_plan* plan = reinterpret_cast<chiasma_decode_plan*>(&problem);
  expect_refused(chiasma_decode_plan_create(&problem.args, nullptr, &plan), GetParam());
  EXPECT_EQ(plan, nullptr);
  expect_refused(chiasma_kernel_check("cpu_simd", &problem.args), GetParam());
  EXPECT_THROW(good.run(problem.args, workspace.span()), Error);
  for (const std::uint16_t value : problem.out) ASSERT_EQ(value, 0x7fc0) << "an output was written";
}

INSTANTIATE_TEST_SUITE_P(All, BadShape, testing::ValuesIn(kBadShapes),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

class BadDataTest : public testing::TestWithParam<BadCall> {};

TEST_P(BadDataTest, IsRefusedByRunWithNothingWritten) {
  SmallProblem problem;
  const DecodePlan plan(problem.args);
  HostWorkspace workspace(plan.workspace_bytes());
  GetParam().bend(problem);
  EXPECT_NO_THROW(DecodePlan{problem.args}) << "planning must not look at addresses";
  try {
    plan.run(problem.args, workspace.span());
    FAIL() << "accepted";
  } catch (const Error& error) {
    expect_refused(error.status(), GetParam());
  }
  for (const std::uint16_t value : problem.out) ASSERT_EQ(value, 0x7fc0);
}

INSTANTIATE_TEST_SUITE_P(All, BadDataTest, testing::ValuesIn(kBadData),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(Validate, NullStructsAreNamed) {
  chiasma_decode_plan* plan = nullptr;
  EXPECT_EQ(chiasma_decode_plan_create(nullptr, nullptr, &plan), CHIASMA_INVALID_ARGUMENT);
  EXPECT_STREQ(chiasma_last_error(), "args is NULL");
  SmallProblem problem;
  EXPECT_EQ(chiasma_decode_plan_create(&problem.args, nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_EQ(chiasma_decode_run(nullptr, &problem.args, nullptr, 0, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_EQ(chiasma_merge(nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_EQ(chiasma_quantize(nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_EQ(chiasma_dequantize(nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
}

TEST(Validate, StridesOfExtentOneAreIgnored) {
  SmallProblem problem;
  problem.args.kv_cache.shape[0] = 1;
  problem.args.kv_cache.stride[0] = -3;
  EXPECT_NO_THROW(decode_on_cpu(problem.args)) << chiasma_last_error();
}

TEST(Validate, CacheMayHaveAHeadDimension) {
  SmallProblem problem;
  problem.args.kv_cache =
      tensor(problem.aligned_cache(), CHIASMA_UINT8, kCpu, {SmallProblem::kPages, SmallProblem::kPage, 1, 656});
  EXPECT_NO_THROW(decode_on_cpu(problem.args));
  problem.args.kv_cache =
      tensor(problem.aligned_cache(), CHIASMA_UINT8, kCpu, {SmallProblem::kPages, SmallProblem::kPage / 2, 2, 656});
  EXPECT_THROW(decode_on_cpu(problem.args), Error);
}

TEST(Validate, EmptyTensorsNeedNoMemory) {
  SmallProblem problem;
  for (chiasma_tensor* tensor :
       {&problem.args.q, &problem.args.indices, &problem.args.topk_length, &problem.args.out, &problem.args.lse}) {
    tensor->shape[0] = 0;
    tensor->data = nullptr;
  }
  EXPECT_NO_THROW(decode_on_cpu(problem.args));
}

TEST(Validate, MergeShapes) {
  std::vector<float> part_out(2 * 512), part_lse(2), out(512), lse(1);
  chiasma_merge_args args{};
  args.part_out = tensor(std::span(part_out), {2, 1, 1, 1, 512});
  args.part_lse = tensor(std::span(part_lse), {2, 1, 1, 1});
  args.out = tensor(std::span(out), {1, 1, 1, 512});
  args.lse = tensor(std::span(lse), {1, 1, 1});
  EXPECT_EQ(chiasma_merge(&args, nullptr), CHIASMA_OK) << chiasma_last_error();
  args.part_lse.shape[0] = 3;
  EXPECT_EQ(chiasma_merge(&args, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(chiasma_last_error()).find("part_lse has shape [3, 1, 1, 1]"), std::string::npos);
  args.part_lse.shape[0] = 2;
  args.out.data = part_out.data();
  EXPECT_EQ(chiasma_merge(&args, nullptr), CHIASMA_INVALID_ARGUMENT) << "in-place merging would read what it wrote";
}

TEST(Validate, QuantizeShapes) {
  std::vector<std::uint16_t> kv(8 * 576, 0x3f80);
  SmallProblem problem;
  chiasma_quantize_args args{};
  args.format = CHIASMA_KV_V32;
  args.scale = CHIASMA_SCALE_POW2;
  args.kv = tensor(kv.data(), CHIASMA_BFLOAT16, kCpu, {8, 576});
  args.kv_cache = problem.args.kv_cache;
  EXPECT_EQ(chiasma_quantize(&args, nullptr), CHIASMA_OK) << chiasma_last_error();
  args.kv_cache.shape[0] = 0;
  EXPECT_EQ(chiasma_quantize(&args, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_STREQ(
      chiasma_last_error(),
      "kv has 8 rows but kv_cache has 0 slots; without slot_mapping every row needs the slot of its own number");
  args.format = CHIASMA_KV_BF16;
  EXPECT_EQ(chiasma_quantize(&args, nullptr), CHIASMA_INVALID_ARGUMENT);
  args.format = CHIASMA_KV_V4;
  args.scale = CHIASMA_SCALE_AMAX;
  EXPECT_EQ(chiasma_quantize(&args, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_STREQ(chiasma_last_error(), "scale is 2; format v4 allows pow2 (1) only");
}

}  // namespace
}  // namespace chiasma::test
