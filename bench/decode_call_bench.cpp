// What a call of chiasma_decode_run() costs the thread that makes it, with a GPU: checks, plan and launches, not the
// work on the device. An iteration is a hundred calls into an empty stream; waiting for them is not counted.
#include <benchmark/benchmark.h>

#include <chrono>
#include <memory>
#include <string>

#include "harness/run.h"

namespace chiasma::bench {
namespace {

constexpr int kCalls = 100;
constexpr int kIterations = 100;

// Everything that a call needs; null runner: error says why.
struct Prepared {
  std::unique_ptr<harness::Device> device;
  std::unique_ptr<harness::Workload> workload;
  std::unique_ptr<harness::Queue> queue;
  std::unique_ptr<harness::Runner> runner;
  std::string error;

  explicit Prepared(const char* line) {
    harness::Case spec;
    harness::RunError run_error;
    device = harness::open_device("cuda", &error);
    if (device == nullptr || !harness::parse_case(line, &spec, &error)) return;
    workload = harness::Workload::make(spec, &error);
    if (workload == nullptr) return;
    queue = device->open_queue();
    harness::RunOptions options;
    options.queue = queue.get();
    runner = harness::Runner::make(*workload, *device, options, &run_error);
    if (runner == nullptr) error = run_error.message;
  }
};

void decode_call(benchmark::State& state, const char* line) {
  Prepared prepared(line);
  if (prepared.runner == nullptr) return state.SkipWithError(prepared.error.c_str());
  harness::RunError run_error;
  for (auto _ : state) {
    bool ok = true;
    const auto begin = std::chrono::steady_clock::now();
    for (int call = 0; call < kCalls; ++call) ok = prepared.runner->launch(&run_error) && ok;
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (!ok || !prepared.queue->synchronize(&prepared.error)) return state.SkipWithError("a call failed");
    state.SetIterationTime(elapsed.count() / kCalls);
  }
  state.SetLabel(prepared.runner->kernel());
}

// The first does everything but the launches, since there is nothing to do.
BENCHMARK_CAPTURE(decode_call, nothing, "decode b=0 h=128 pool=16384")->Iterations(kIterations)->UseManualTime();
BENCHMARK_CAPTURE(decode_call, one_kernel, "decode b=66 h=128 pool=64 topk=64")
    ->Iterations(kIterations)
    ->UseManualTime();
BENCHMARK_CAPTURE(decode_call, kernel_and_merge, "decode b=1 h=128 pool=16384")
    ->Iterations(kIterations)
    ->UseManualTime();

}  // namespace
}  // namespace chiasma::bench
