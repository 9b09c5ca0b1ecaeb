// Every CUDA kernel against the oracle over cases/edge.cases, one test a line and kernel.
#include <filesystem>

#include "gpu_fixture.h"
#include "harness/check.h"

namespace chiasma::harness {
namespace {

std::vector<Case> edge_cases() {
  std::vector<Case> cases;
  std::string error;
  read_case_file(std::filesystem::path(CHIASMA_SOURCE_DIR) / "cases/edge.cases", &cases, &error);
  return cases;
}

using KernelAndCase = std::tuple<std::string, Case>;

class GpuEdgeCases : public GpuTest, public testing::WithParamInterface<KernelAndCase> {
 protected:
  // Saying what is missing is right for a kernel of a narrower purpose, as long as another one does the case.
  void expect_right_refusal(Workload& workload, const RunError& refusal) {
    const Case& spec = workload.spec();
    const bool is_odd = refusal.status == CHIASMA_INVALID_ARGUMENT && spec.layout == Layout::kOdd;
    ASSERT_TRUE(refusal.status == CHIASMA_UNSUPPORTED || is_odd) << to_line(spec) << "\n" << refusal.message;
    RunError error;
    EXPECT_NE(Runner::make(workload, *device_, {}, &error), nullptr) << to_line(spec) << "\n" << error.message;
  }
};

TEST_P(GpuEdgeCases, MatchTheOracle) {
  const auto& [kernel, spec] = GetParam();
  std::string message;
  const std::unique_ptr<Workload> workload = Workload::make(spec, &message);
  ASSERT_NE(workload, nullptr) << message;
  RunError error;
  std::string used;
  if (!run_case(*workload, *device_, {.kernel = kernel}, &used, &error)) {
    expect_right_refusal(*workload, error);
    return;
  }
  const CheckReport report = check(*workload, tolerance_of(CHIASMA_CUDA, spec));
  EXPECT_TRUE(report.passed) << to_line(spec) << "\n" << report.failure;
}

std::string name_of(const testing::TestParamInfo<KernelAndCase>& info) {
  return std::to_string(info.index) + "_" + std::get<0>(info.param);
}

INSTANTIATE_TEST_SUITE_P(File, GpuEdgeCases,
                         testing::Combine(testing::ValuesIn(cuda_kernels()), testing::ValuesIn(edge_cases())), name_of);

}  // namespace
}  // namespace chiasma::harness
