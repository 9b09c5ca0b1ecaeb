// The CPU kernel against the oracle over cases/edge.cases, one test a line.
#include <gtest/gtest.h>

#include <cctype>
#include <filesystem>

#include "harness/check.h"
#include "harness/run.h"

namespace chiasma::harness {
namespace {

std::vector<Case> edge_cases() {
  std::vector<Case> cases;
  std::string error;
  read_case_file(std::filesystem::path(CHIASMA_SOURCE_DIR) / "cases/edge.cases", &cases, &error);
  return cases;  // empty when unreadable, which FileHasCases reports
}

// "decode b=1 valid=0.5" becomes "b1_valid0p5".
std::string name_of(const testing::TestParamInfo<Case>& info) {
  const std::string line = to_line(info.param);
  std::string name = std::to_string(info.index);
  for (const char c : line.substr(line.find(' ') == std::string::npos ? line.size() : line.find(' '))) {
    if (std::isalnum(static_cast<unsigned char>(c)) != 0) name += c;
    if (c == ' ') name += '_';
    if (c == '.') name += 'p';
    if (c == '-') name += "minus";
  }
  return name;
}

class EdgeCases : public testing::TestWithParam<Case> {};

TEST_P(EdgeCases, CpuMatchesTheOracle) {
  const Case& spec = GetParam();
  std::string message;
  const std::unique_ptr<Workload> workload = Workload::make(spec, &message);
  ASSERT_NE(workload, nullptr) << message;
  const std::unique_ptr<Device> device = open_cpu_device();
  RunError error;
  std::string kernel;
  ASSERT_TRUE(run_case(*workload, *device, {}, &kernel, &error)) << to_line(spec) << "\n" << error.message;
  const CheckReport report = check(*workload, tolerance_of(CHIASMA_CPU, spec));
  EXPECT_TRUE(report.passed) << to_line(spec) << "\n" << report.failure;
}

INSTANTIATE_TEST_SUITE_P(File, EdgeCases, testing::ValuesIn(edge_cases()), name_of);

TEST(EdgeCaseFile, HasCases) {
  EXPECT_GT(edge_cases().size(), 100u);
}

}  // namespace
}  // namespace chiasma::harness
