// Plans: choice by name, environment and fit; purity; what run() holds callers to.
#include "api/plan.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/api/problem_fixture.h"

namespace chiasma::test {
namespace {

// Sets a variable for the length of a test.
class ScopedEnvironment {
 public:
  ScopedEnvironment(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedEnvironment() { unsetenv(name_); }

 private:
  const char* name_;
};

bool last_error_has(const char* part) {
  return std::string(chiasma_last_error()).find(part) != std::string::npos;
}

TEST(Plan, TextSaysWhatAndWhy) {
  SmallProblem problem;
  const DecodePlan plan(problem.args);
  EXPECT_EQ(plan.kernel(), "cpu_simd");
  for (const char* part : {"format v32", "b 2, s_q 3, h_q 4, topk 5", "page 8, slots 32", "cpu_simd", "workspace: "}) {
    EXPECT_NE(plan.text().find(part), std::string::npos) << part << " missing in:\n" << plan.text();
  }
}

TEST(Plan, KernelByNameAndByEnvironment) {
  SmallProblem problem;
  chiasma_plan_options options{};
  options.kernel = "cpu_simd";
  EXPECT_NE(DecodePlan(problem.args, options).text().find("asked for by options.kernel"), std::string::npos);
  {
    const ScopedEnvironment variable("CHIASMA_KERNEL", "cpu_simd");
    EXPECT_NE(DecodePlan(problem.args).text().find("asked for by CHIASMA_KERNEL"), std::string::npos);
  }
  {
    const ScopedEnvironment variable("CHIASMA_KERNEL", "no_such_kernel");
    EXPECT_THROW(DecodePlan{problem.args}, Error);
    EXPECT_TRUE(last_error_has("CHIASMA_KERNEL names kernel 'no_such_kernel'")) << chiasma_last_error();
    EXPECT_TRUE(last_error_has("cpu_simd")) << "the message must list what there is";
    EXPECT_NO_THROW(DecodePlan(problem.args, options)) << "options go before the environment";
  }
  const ScopedEnvironment variable("CHIASMA_KERNEL", "");
  EXPECT_NO_THROW(DecodePlan{problem.args}) << "an empty variable counts as unset";
}

// Kernels that only have opinions.
constexpr chiasma_kernel_info info_of(const char* name) {
  return {name, CHIASMA_CPU, "", ""};
}
Status accept(const PlanRequest& /*request*/) {
  return {};
}
Status refuse(const PlanRequest& /*request*/) {
  return {CHIASMA_UNSUPPORTED, "it lacks something"};
}
bool never_suits(const PlanRequest& /*request*/) {
  return false;
}
double slow(const PlanRequest& /*request*/) {
  return 20.04;
}
double fast(const PlanRequest& /*request*/) {
  return 10.0;
}
double must_not_be_asked(const PlanRequest& /*request*/) {
  ADD_FAILURE() << "this kernel cannot do it";
  return 1.0;
}

// Name of the kernel that is chosen, and why.
std::pair<std::string, std::string> selected(const std::vector<Kernel>& kernels, bool batch_invariant = false,
                                             int num_splits = 0) {
  const DecodeProblem problem{};
  chiasma_device_info device{};
  device.device = {CHIASMA_CPU, 0};
  const Kernel* chosen = nullptr;
  std::string reason;
  const Status status = select_kernel(kernels, {problem, device, batch_invariant, num_splits, 0}, &chosen, &reason);
  return status.ok() ? std::pair(std::string(chosen->info.name), reason) : std::pair(std::string(), status.message());
}

TEST(SelectKernel, TheFastestOfThoseWithAnEstimate) {
  const std::vector<Kernel> kernels = {{info_of("lacking"), refuse, nullptr, nullptr, must_not_be_asked},
                                       {info_of("slow"), accept, nullptr, nullptr, slow},
                                       {info_of("fast"), accept, nullptr, nullptr, fast},
                                       {info_of("slow_too"), accept, nullptr, nullptr, slow},
                                       {info_of("silent"), accept, nullptr, nullptr}};
  const auto [name, reason] = selected(kernels);
  EXPECT_EQ(name, "fast");
  EXPECT_EQ(reason,
            "estimated at 10 us; passed over:\n  lacking: it lacks something\n  slow: estimated at 20 us\n"
            "  slow_too: estimated at 20 us");
}

TEST(SelectKernel, OrderDecidesWhereNobodyEstimatesOrTheBatchMustNotMatter) {
  const std::vector<Kernel> kernels = {{info_of("unfit"), accept, never_suits, nullptr, fast},
                                       {info_of("slow"), accept, nullptr, nullptr, slow},
                                       {info_of("fast"), accept, nullptr, nullptr, fast}};
  EXPECT_EQ(selected(kernels).first, "fast");
  EXPECT_EQ(selected(kernels, true).first, "slow");
  EXPECT_EQ(selected(kernels, false, 4).first, "slow");
  const std::vector<Kernel> silent_first = {{info_of("silent"), accept, nullptr, nullptr},
                                            {info_of("fast"), accept, nullptr, nullptr, fast}};
  EXPECT_EQ(selected(silent_first), std::pair(std::string("silent"), std::string("first choice for this problem")));
}

TEST(SelectKernel, AKernelThatDoesNotSuitIsBetterThanNone) {
  const std::vector<Kernel> kernels = {{info_of("lacking"), refuse, nullptr, nullptr},
                                       {info_of("unfit"), accept, never_suits, nullptr}};
  EXPECT_EQ(selected(kernels), std::pair(std::string("unfit"), std::string("no other kernel can do it")));
  EXPECT_NE(selected({{info_of("lacking"), refuse, nullptr, nullptr}}).second.find("it lacks something"),
            std::string::npos);
  EXPECT_NE(selected({}).second.find("this build has none"), std::string::npos);
}

TEST(Plan, KernelCheckExplains) {
  SmallProblem problem;
  EXPECT_EQ(chiasma_kernel_check("cpu_simd", &problem.args), CHIASMA_OK);
  EXPECT_EQ(chiasma_kernel_check("nope", &problem.args), CHIASMA_UNSUPPORTED);
  EXPECT_TRUE(last_error_has("'nope'"));
  EXPECT_EQ(chiasma_kernel_check(nullptr, &problem.args), CHIASMA_INVALID_ARGUMENT);
}

TEST(Plan, OptionsAreChecked) {
  SmallProblem problem;
  chiasma_plan_options options{};
  options.num_splits = -1;
  EXPECT_THROW(DecodePlan(problem.args, options), Error);
  EXPECT_TRUE(last_error_has("num_splits is -1"));
  options = {};
  options.num_threads = -2;
  EXPECT_THROW(DecodePlan(problem.args, options), Error);
  EXPECT_TRUE(last_error_has("num_threads is -2"));
}

TEST(Plan, RunHoldsCallerToTheShapesPlannedFor) {
  SmallProblem problem;
  const DecodePlan plan(problem.args);
  HostWorkspace workspace(plan.workspace_bytes());
  SmallProblem other;
  EXPECT_NO_THROW(plan.run(other.args, workspace.span())) << "other addresses are fine";
  other.args.indices.shape[2] = 4;
  EXPECT_THROW(plan.run(other.args, workspace.span()), Error);
  EXPECT_TRUE(last_error_has("indices has shape [2, 3, 4]; the plan was made for [2, 3, 5]")) << chiasma_last_error();
  other.args.indices.shape[2] = 5;
  other.args.attn_sink = {};
  EXPECT_THROW(plan.run(other.args, workspace.span()), Error);
  EXPECT_TRUE(last_error_has("attn_sink"));
}

TEST(Plan, RunChecksTheWorkspace) {
  SmallProblem problem;
  const DecodePlan plan(problem.args);
  ASSERT_GT(plan.workspace_bytes(), 0u);
  HostWorkspace workspace(plan.workspace_bytes() + 64);
  EXPECT_THROW(plan.run(problem.args, workspace.span().first(plan.workspace_bytes() - 1)), Error);
  EXPECT_TRUE(last_error_has("workspace_bytes is"));
  EXPECT_THROW(plan.run(problem.args, workspace.span().subspan(64)), Error);
  EXPECT_TRUE(last_error_has("multiple of 256"));
  EXPECT_THROW(plan.run(problem.args, {static_cast<std::byte*>(nullptr), plan.workspace_bytes()}), Error);
  EXPECT_TRUE(last_error_has("workspace is NULL"));
}

TEST(Plan, OneRequestCanBePlannedForAnotherMachine) {
  SmallProblem problem;
  chiasma_device_info imagined{};
  imagined.device = kCpu;
  std::strcpy(imagined.name, "imagined");
  imagined.compute_units = 7;
  chiasma_plan_options options{};
  options.device_info = &imagined;
  EXPECT_NE(DecodePlan(problem.args, options).text().find("imagined, 7 compute units"), std::string::npos);
}

TEST(Plan, CudaTensorsWithoutCudaAreUnavailable) {
  if (chiasma_cuda_available() == CHIASMA_OK) GTEST_SKIP() << "this machine has a CUDA device";
  const std::string why = chiasma_last_error();
  SmallProblem problem;
  for (chiasma_tensor* tensor :
       {&problem.args.q, &problem.args.kv_cache, &problem.args.indices, &problem.args.topk_length,
        &problem.args.attn_sink, &problem.args.out, &problem.args.lse}) {
    tensor->device = cuda_device();
  }
  chiasma_decode_plan* plan = nullptr;
  EXPECT_EQ(chiasma_decode_plan_create(&problem.args, nullptr, &plan), CHIASMA_DEVICE_UNAVAILABLE);
  EXPECT_EQ(chiasma_last_error(), why);
}

TEST(Errors, MessagesArePerThread) {
  EXPECT_EQ(chiasma_merge(nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
  std::string seen_elsewhere = "unset";
  std::thread([&] { seen_elsewhere = chiasma_last_error(); }).join();
  EXPECT_EQ(seen_elsewhere, "");
  EXPECT_STREQ(chiasma_last_error(), "args is NULL");
}

TEST(Errors, EveryStatusHasAName) {
  for (int status = CHIASMA_OK; status <= CHIASMA_INTERNAL_ERROR; ++status) {
    EXPECT_STRNE(chiasma_status_name(static_cast<chiasma_status>(status)), "unknown status");
  }
  EXPECT_STREQ(chiasma_status_name(static_cast<chiasma_status>(99)), "unknown status");
}

TEST(Queries, DevicesAndKernels) {
  ASSERT_GE(chiasma_device_count(), 1);
  const auto found = devices();
  EXPECT_EQ(found[0].device.kind, CHIASMA_CPU);
  EXPECT_GT(found[0].compute_units, 0);
  EXPECT_GT(found[0].memory_bytes, 0);
  EXPECT_NE(found[0].name[0], '\0');
  chiasma_device_info info;
  EXPECT_EQ(chiasma_device_query(chiasma_device_count(), &info), CHIASMA_INVALID_ARGUMENT);
  EXPECT_EQ(chiasma_device_query(-1, &info), CHIASMA_INVALID_ARGUMENT);
  for (const chiasma_kernel_info& kernel : kernels()) {
    EXPECT_GT(std::strlen(kernel.summary), 0u);
    EXPECT_GT(std::strlen(kernel.supports), 0u);
  }
  chiasma_kernel_info kernel;
  EXPECT_EQ(chiasma_kernel_query(-1, &kernel), CHIASMA_INVALID_ARGUMENT);
}

TEST(Queries, KvPageBytes) {
  EXPECT_EQ(chiasma_kv_page_bytes(CHIASMA_KV_V32, 64), 64 * 656);
  EXPECT_EQ(chiasma_kv_page_bytes(CHIASMA_KV_V4, 64), 37440);  // 64 * 584 rounded up to a multiple of 576
  EXPECT_EQ(chiasma_kv_page_bytes(CHIASMA_KV_BF16, 1), 1152);
  EXPECT_EQ(chiasma_kv_page_bytes(CHIASMA_KV_V32, 0), 0);
  EXPECT_EQ(chiasma_kv_page_bytes(static_cast<chiasma_kv_format>(0), 64), 0);
  EXPECT_DOUBLE_EQ(chiasma_default_sm_scale(CHIASMA_KV_V32), 1.0 / 24.0);
}

TEST(Oracle, ChecksItsArguments) {
  SmallProblem problem;
  problem.args.out = {};
  problem.args.lse = {};
  std::vector<double> out(6 * 4 * 512), lse(6 * 4);
  EXPECT_EQ(chiasma_decode_oracle(&problem.args, nullptr, 6, out.data(), lse.data(), nullptr, nullptr), CHIASMA_OK);
  EXPECT_EQ(chiasma_decode_oracle(&problem.args, nullptr, 5, out.data(), lse.data(), nullptr, nullptr),
            CHIASMA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("num_rows is 5"));
  const std::int64_t rows[] = {5, 6};
  EXPECT_EQ(chiasma_decode_oracle(&problem.args, rows, 1, out.data(), lse.data(), nullptr, nullptr), CHIASMA_OK);
  EXPECT_EQ(chiasma_decode_oracle(&problem.args, rows, 2, out.data(), lse.data(), nullptr, nullptr),
            CHIASMA_INVALID_ARGUMENT);
  EXPECT_TRUE(last_error_has("rows[1] is 6; allowed are 0 to 5"));
  EXPECT_EQ(chiasma_decode_oracle(&problem.args, rows, 1, nullptr, lse.data(), nullptr, nullptr),
            CHIASMA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace chiasma::test
