// Differential fuzzing: random cases on the CPU, against the oracle and against themselves with another number of
// threads. CHIASMA_FUZZ_SECONDS makes it run longer, CHIASMA_FUZZ_SEED starts elsewhere.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "harness/check.h"
#include "harness/random.h"
#include "harness/random_case.h"
#include "harness/run.h"

namespace chiasma::harness {
namespace {

constexpr double kDefaultSeconds = 8;
constexpr std::uint64_t kDefaultSeed = 20240;
constexpr int kMinCases = 5;  // however slow the machine

std::vector<std::byte> output_bytes(const Workload& workload) {
  std::vector<std::byte> bytes;
  for (const Region& region : workload.regions()) {
    if (region.is_output) bytes.insert(bytes.end(), region.base(), region.base() + region.bytes());
  }
  return bytes;
}

// "" when the case is right.
std::string problem_of(const Case& spec) {
  std::string message;
  const std::unique_ptr<Workload> workload = Workload::make(spec, &message);
  if (workload == nullptr) return message;
  const std::unique_ptr<Device> device = open_cpu_device();
  RunError error;
  RunOptions one_thread;
  one_thread.num_threads = 1;
  if (!run_case(*workload, *device, one_thread, nullptr, &error)) return error.message;
  const std::vector<std::byte> with_one_thread = output_bytes(*workload);
  if (!run_case(*workload, *device, {}, nullptr, &error)) return error.message;
  if (output_bytes(*workload) != with_one_thread) return "the number of threads changes the result's bits";
  return check(*workload, tolerance_of(CHIASMA_CPU, spec)).failure;
}

TEST(RandomCases, CpuMatchesTheOracle) {
  const char* seconds_text = std::getenv("CHIASMA_FUZZ_SECONDS");
  const char* seed_text = std::getenv("CHIASMA_FUZZ_SEED");
  const double seconds = seconds_text == nullptr ? kDefaultSeconds : std::strtod(seconds_text, nullptr);
  const std::uint64_t seed = seed_text == nullptr ? kDefaultSeed : std::strtoull(seed_text, nullptr, 10);
  const auto begin = std::chrono::steady_clock::now();
  int count = 0;
  for (; count < kMinCases || std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() < seconds;
       ++count) {
    const Case spec = random_case(derive(seed, static_cast<std::uint64_t>(count)));
    const std::string problem = problem_of(spec);
    ASSERT_EQ(problem, "") << "case " << count << " of seed " << seed << "; again: chiasma verify --case '"
                           << to_line(spec) << "'";
  }
  RecordProperty("cases", count);
}

TEST(RandomCases, LinesAreReplayable) {
  for (std::uint64_t key = 0; key < 2000; ++key) {
    const Case spec = random_case(key);
    Case again;
    std::string error;
    ASSERT_TRUE(parse_case(to_line(spec), &again, &error)) << to_line(spec) << ": " << error;
    ASSERT_EQ(again, spec);
  }
}

}  // namespace
}  // namespace chiasma::harness
