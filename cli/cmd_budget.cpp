// chiasma budget: what the device can do, what a block needs of it, and what the kernels take.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <span>

#include "cli/budget_report.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/progress.h"
#include "cuda/ceilings/ceilings.h"
#include "cuda/sm90_sparse_fp8/budget.h"
#include "cuda/sm90_sparse_fp8_direct/budget.h"
#include "harness/check.h"
#include "harness/timing.h"

namespace chiasma::cli {
namespace {

// One line a kernel that has a budget.
struct KernelModel {
  const char* kernel;
  std::span<const tile::Need> needs;
};
constexpr KernelModel kModels[] = {
    {"sm90_sparse_fp8_direct", sm90_sparse_fp8_direct::kNeeds},
    {"sm90_sparse_fp8_crossover", sm90_sparse_fp8::kCrossoverNeeds},
    {"sm90_sparse_fp8_baseline", sm90_sparse_fp8::kBaselineNeeds},
};

constexpr const char* kDescription =
    "Measures the device's ceilings (tensor cores, shared memory, conversion, exchange between thread blocks, gather,\n"
    "memory), then divides what a block of 64 tokens and 64 heads needs by them and puts the kernels' measured time\n"
    "beside it. \"clk\" is one clock of one multiprocessor. A kernel that overlaps everything perfectly takes as long "
    "as\n"
    "the busiest resource. Needs a GPU of compute capability 9.0 and about 6 GB of its memory.";
constexpr const char* kDefaultCase = "decode b=128 sq=2 pool=32768";

struct Options {
  std::string device = "cuda", json, line = kDefaultCase;
};

#ifdef CHIASMA_HAS_CUDA
Figures measure_ceilings(int device) {
  const Progress progress("measuring ceilings");
  Figures figures;
  const Status status = ceilings::measure(device, &figures);
  if (!status.ok()) throw CommandError(kExitUnavailable, status.message());
  return figures;
}
// The clock while work() runs on the device.
template <typename Work>
double sm_mhz_during(Work&& work) {
  ceilings::ClockMeter meter;
  meter.start();
  work();
  return meter.stop_mhz();
}
#else
// Without CUDA in the build open_device() has failed before.
Figures measure_ceilings(int /*device*/) {
  throw CommandError(kExitUnavailable, "this build has no CUDA");
}
template <typename Work>
double sm_mhz_during(Work&& /*work*/) {
  throw CommandError(kExitUnavailable, "this build has no CUDA");
}
#endif

harness::Case parse_budget_case(const std::string& line) {
  harness::Case spec;
  std::string error;
  if (!harness::parse_case(line, &spec, &error)) fail_input("--case: {}", error);
  if (spec.fmt != CHIASMA_KV_V32 || spec.h <= 64 || spec.valid != 1.0 || spec.len != harness::LengthMode::kNone) {
    fail_input("--case: budgets are of v32 caches, more than 64 heads and rows of full length");
  }
  return spec;
}

struct Prepared {
  std::unique_ptr<harness::Runner> runner;
  KernelTime time;
};

Prepared prepare(harness::Workload& workload, harness::Device& device, const char* kernel) {
  // The check only guards against timing a wrong kernel, so a few rows do.
  constexpr double kCheckMultiplyAdds = 1e9;
  Prepared prepared;
  prepared.time.kernel = kernel;
  harness::RunOptions options;
  options.kernel = kernel;
  harness::RunError error;
  workload.reset_outputs();
  prepared.runner = harness::Runner::make(workload, device, options, &error);
  if (prepared.runner == nullptr || !prepared.runner->launch(&error) || !prepared.runner->fetch(&error)) {
    throw CommandError(kExitUnavailable, fmt::format("{}: {}", kernel, error.message));
  }
  harness::CheckOptions check_options;
  check_options.max_multiply_adds = kCheckMultiplyAdds;
  prepared.time.report =
      harness::check(workload, harness::tolerance_of(device.id().kind, workload.spec()), check_options);
  if (!prepared.time.report.passed) {
    throw CommandError(kExitCheckFailed,
                       fmt::format("{} is wrong, not timed: {}", kernel, prepared.time.report.failure));
  }
  return prepared;
}

// The clock while this kernel runs, over enough calls for the power limit to act.
double sm_mhz_of(harness::Runner& runner, double call_us) {
  constexpr double kRunUs = 2e5;
  return sm_mhz_during([&] {
    harness::RunError error;
    for (double us = 0; us < kRunUs; us += std::max(call_us, 1.0)) {
      if (!runner.launch(&error)) throw CommandError(kExitUnavailable, error.message);
    }
  });
}

// In the order of kModels.
std::vector<KernelTime> time_kernels(const harness::Case& spec, harness::Device& device) {
  const Progress progress(fmt::format("timing {}", harness::to_line(spec)));
  std::string message;
  const std::unique_ptr<harness::Workload> workload = harness::Workload::make(spec, &message);
  if (workload == nullptr) throw CommandError(kExitUnavailable, message);
  std::vector<Prepared> prepared;
  std::vector<harness::Runner*> runners;
  for (const KernelModel& model : kModels) {
    prepared.push_back(prepare(*workload, device, model.kernel));
    runners.push_back(prepared.back().runner.get());
  }
  harness::TimingOptions options;
  options.seconds_per_runner = 0.4;
  std::vector<harness::Timing> timings;
  harness::RunError error;
  if (!harness::time_runners(runners, options, &timings, &error)) throw CommandError(kExitUnavailable, error.message);
  std::vector<KernelTime> times;
  for (std::size_t n = 0; n < prepared.size(); ++n) {
    prepared[n].time.loop_us = timings[n].loop;
    prepared[n].time.sm_mhz = sm_mhz_of(*runners[n], timings[n].loop.median);
    times.push_back(prepared[n].time);
  }
  return times;
}

int count_multiprocessors(const chiasma_device& device) {
  for (std::int32_t number = 0; number < chiasma_device_count(); ++number) {
    chiasma_device_info info{};
    check_status(chiasma_device_query(number, &info), "device");
    if (info.device.kind == device.kind && info.device.index == device.index) return info.compute_units;
  }
  throw CommandError(kExitUnavailable, "the device is gone");
}

int run_budget(const Options& options) {
  const harness::Case spec = parse_budget_case(options.line);
  if (!options.device.starts_with("cuda")) fail_input("--device {}: must be cuda or cuda:N", options.device);
  ResultFile file(options.json);
  const std::unique_ptr<harness::Device> device = open_device(options.device, "");
  Json json = result_head("chiasma budget", *device);
  for (const auto& [key, value] : device->describe()) fmt::print("# {}: {}\n", key, value);
  fmt::print("# chiasma {}, commit {}\n", chiasma_version(), git_commit());

  const int multiprocessors = count_multiprocessors(device->id());
  const Figures figures = measure_ceilings(device->id().index);
  print_figures(figures, multiprocessors);
  json["ceilings"] = figures_json(figures, multiprocessors);
  json["case"] = harness::to_line(spec);
  json["kernels"] = Json::array();
  fmt::print("\n{}\n", harness::to_line(spec));
  const std::vector<KernelTime> times = time_kernels(spec, *device);
  for (std::size_t n = 0; n < times.size(); ++n) {
    const Compared compared = compare(times[n], kModels[n].needs, figures, spec, multiprocessors);
    print_kernel(compared);
    json["kernels"].push_back(kernel_json(compared));
  }
  file.write(json);
  return kExitOk;
}

}  // namespace

void register_budget(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      app.add_subcommand("budget", "Measure the GPU's ceilings and print the cycle budget of its kernels");
  command->description(kDescription);
  command->add_option("--json", options->json, "write the figures here, with machine, version and commit")
      ->type_name("FILE");
  command->add_option("--case", options->line, "what the kernels are timed on")
      ->type_name("LINE")
      ->capture_default_str();
  command->add_option("--device", options->device, "cuda or cuda:N")->capture_default_str();
  command->callback([options, &exit_code] { exit_code = run_budget(*options); });
}

}  // namespace chiasma::cli
