// A process that has used several threads forks, and the child computes: PyTorch's data loaders do that.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/threads.h"
#include "tests/cpu/decode_run.h"
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

}  // namespace
}  // namespace chiasma::test
