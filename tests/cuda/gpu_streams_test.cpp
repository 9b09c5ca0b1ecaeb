// The caller's stream, several of them at once, several threads, another device.
#include <chrono>
#include <thread>
#include <utility>

#include "gpu_fixture.h"
#include "harness/check.h"

namespace chiasma::harness {
namespace {

class GpuStreams : public GpuKernelTest {};

// Shapes that cut rows and shapes that do not.
const std::vector<std::string> kShapes = {
    "decode b=3 pool=3000 scale=amax valid=0.9 len=random sink=random",
    "decode b=2 h=16 sq=2 pool=2000 topk=1025 scale=amax garbage=1 valid=0.8",
    "decode b=150 h=64 pool=300 topk=129 scale=amax",
    "decode b=1 h=8 pool=5000 topk=4097 scale=amax splits=7",
    "decode b=9 h=127 pool=700 topk=500 scale=amax invariant=1 layout=strided",
};

// With the stream held back nothing may happen to the outputs: no part of the work is on any other stream.
TEST_P(GpuStreams, AllWorkIsOnTheCallersStream) {
  for (const auto& prepared : prepare_all(kShapes)) {
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    prepared->queue_poisoned_outputs();
    std::string message;
    ASSERT_TRUE(prepared->queue->synchronize(&message)) << message;
    const DeviceBlock& out = prepared->runner->blocks()[1];
    ASSERT_TRUE(prepared->workload->regions()[1].is_output);
    const std::size_t bytes = prepared->workload->regions()[1].bytes();
    std::vector<std::byte> before(bytes), meanwhile(bytes);
    ASSERT_TRUE(device_->copy_to_host(before.data(), out.get(), bytes));

    RunError error;
    prepared->queue->hold();
    const bool queued = prepared->runner->launch(&error);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const bool copied = device_->copy_to_host(meanwhile.data(), out.get(), bytes);
    prepared->queue->release();
    ASSERT_TRUE(queued) << error.message;
    ASSERT_TRUE(copied);
    EXPECT_EQ(meanwhile, before) << to_line(prepared->workload->spec());
    prepared->queue_comparison();
    expect_no_differences(*prepared->queue, to_line(prepared->workload->spec()));
  }
}

TEST_P(GpuStreams, RunSideBySide) {
  constexpr int kRounds = 300;
  const auto all = prepare_all(kShapes);
  for (const auto& prepared : all) ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
  RunError error;
  for (int round = 0; round < kRounds; ++round) {
    for (const auto& prepared : all) ASSERT_TRUE(prepared->queue_compared_run(&error)) << error.message;
  }
  for (const auto& prepared : all) expect_no_differences(*prepared->queue, to_line(prepared->workload->spec()));
}

TEST_P(GpuStreams, ThreadsWithHandlesOfTheirOwn) {
  constexpr int kRuns = 300;
  const auto all = prepare_all(kShapes);
  for (const auto& prepared : all) ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
  std::vector<RunError> errors(all.size());
  std::vector<std::thread> threads;
  for (std::size_t n = 0; n < all.size(); ++n) {
    threads.emplace_back([&, n] {
      for (int run = 0; run < kRuns; ++run) {
        if (!all[n]->queue_compared_run(&errors[n])) return;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t n = 0; n < all.size(); ++n) {
    EXPECT_EQ(errors[n].message, "");
    expect_no_differences(*all[n]->queue, to_line(all[n]->workload->spec()));
  }
}

// Plans are immutable: threads share one, each with scratch memory and outputs of its own.
TEST_P(GpuStreams, ThreadsShareAPlan) {
  constexpr int kThreads = 4, kRuns = 200;
  const auto all = prepare_all(std::vector<std::string>(kThreads, kShapes.front()));
  if (all.size() != kThreads) return;
  for (const auto& prepared : all) ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
  const chiasma_decode_plan* plan = all.front()->runner->plan();
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t n = 0; n < kThreads; ++n) {
    threads.emplace_back([&, n] {
      const Runner& runner = *all[n]->runner;
      for (int run = 0; run < kRuns; ++run) {
        all[n]->queue_poisoned_outputs();
        if (chiasma_decode_run(plan, &runner.args(), runner.workspace(), runner.workspace_bytes(),
                               all[n]->queue->stream()) != CHIASMA_OK) {
          errors[n] = chiasma_last_error();
        }
        all[n]->queue_comparison();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t n = 0; n < kThreads; ++n) {
    EXPECT_EQ(errors[n], "");
    expect_no_differences(*all[n]->queue, "thread " + std::to_string(n));
  }
}

// Works on the tensors' device, whichever one is current.
TEST_P(GpuStreams, AnotherDevice) {
  std::string message;
  const std::unique_ptr<Device> second = open_device("cuda:1", &message);
  if (second == nullptr) GTEST_SKIP() << "NEEDS TWO GPUS: " << message;
  // Everything that prepare() makes is then on the second one.
  const std::unique_ptr<Device> first = std::exchange(device_, open_device("cuda:1", &message));
  for (const auto& prepared : prepare_all(kShapes)) {
    ASSERT_TRUE(first->synchronize(&message)) << message;  // makes the first device the current one
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    RunError error;
    ASSERT_TRUE(first->synchronize(&message)) << message;
    ASSERT_TRUE(prepared->queue_compared_run(&error)) << error.message;
    expect_no_differences(*prepared->queue, to_line(prepared->workload->spec()));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuStreams, testing::ValuesIn(cuda_kernels()), name_of_kernel);

}  // namespace
}  // namespace chiasma::harness
