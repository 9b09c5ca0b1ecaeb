// A process that has used several threads forks, and the child computes: PyTorch's data loaders do that.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/cache_ops.h"
#include "cpu/threads.h"
#include "tests/cpu/decode_run.h"
#include "tests/cpu/paged_cache.h"
#include "tests/cpu/random_problem.h"

namespace chiasma::test {
namespace {

constexpr unsigned kSecondsAtMost = 30;

// Status of a child that leaves with `work()`, or that is killed because it takes too long.
template <typename Work>
int status_of_child(Work&& work) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kSecondsAtMost);
    _exit(work());
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

TEST(Fork, ChildHasTheParentsBits) {
  for (const std::int64_t b : {1, 40}) {  // threads share a row, and take whole rows
    ProblemShape shape;
    shape.b = b;
    shape.h_q = 16;
    shape.topk = b == 1 ? 2000 : 100;
    shape.pages = 41;
    shape.page_size = 7;
    const RandomProblem random(shape, 1);
    const DecodeResult parent = decode(random.problem, 0, 2);
    const OracleResult reference = oracle(random.problem);
    const cpu::DecodeSchedule schedule = cpu::schedule_decode(random.problem, 0, 2);
    EXPECT_EQ(schedule.num_threads, 2);
    const int status = status_of_child([&] {
      if (cpu::available_threads() != 1) return 2;
      // With the parent's schedule, as a plan made before the fork has it, and with one of its own.
      DecodeProblem problem = random.problem;
      StridedOutputs outputs(problem);
      GuardedScratch scratch(schedule.workspace_bytes);
      cpu::run_decode(problem, schedule, scratch.data());
      if (!same_bits(outputs.take(), parent)) return 3;
      if (!same_bits(decode(random.problem, 0, 0), parent)) return 4;
      return oracle(random.problem).out == reference.out ? 0 : 5;
    });
    ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
    EXPECT_EQ(WEXITSTATUS(status), 0);
  }
  EXPECT_EQ(cpu::team_size(2), 2) << "in the parent nothing changes";
}

// As many rows as make every cache operation use threads.
TEST(Fork, ChildHasTheParentsBytesOfCacheOperations) {
  constexpr std::int64_t kPages = 8, kPage = 64, kSlots = kPages * kPage;
  constexpr std::int64_t kDim = v32::kKeyDim;
  std::vector<bf16_t> kv(static_cast<std::size_t>(kSlots * kDim));
  for (std::size_t i = 0; i < kv.size(); ++i) kv[i] = {static_cast<std::uint16_t>(i * 40503u % 0x7f00u)};
  // Quantised, and back by both ways: the last is what a child compares.
  const auto work = [&] {
    PagedCache cache(KvFormat::v32, kPages, kPage);
    QuantizeProblem quantize{};
    quantize.format = KvFormat::v32;
    quantize.scale = ScaleMode::pow2;
    quantize.tokens = kSlots;
    quantize.kv = kv.data();
    quantize.kv_stride = quantize.rope_stride = kDim;
    quantize.rope = kv.data() + v32::kNopeDim;
    quantize.cache = cache.data();
    quantize.pool = cache.pool();
    cpu::quantize(quantize);
    std::vector<float> values(static_cast<std::size_t>(2 * kSlots * kDim));
    DequantizeProblem dequantize{KvFormat::v32, cache.pool(), values.data(), false, kPage * kDim, kDim};
    cpu::dequantize(dequantize);
    std::vector<std::int64_t> slots(kSlots);
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i * 5 % kSlots);
    GatherProblem gather{};
    gather.format = KvFormat::v32;
    gather.cache = cache.pool();
    gather.rows = kSlots;
    gather.kv = values.data() + kSlots * kDim;
    gather.kv_stride = kDim;
    gather.slots = {slots.data(), true, 1};
    cpu::gather_dequantize(gather);
    return values;
  };
  const std::vector<float> parent = work();
  const int status = status_of_child([&] { return work() == parent ? 0 : 1; });
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace chiasma::test
