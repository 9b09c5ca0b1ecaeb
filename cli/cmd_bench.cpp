// chiasma bench: times cases; several kernels alternate in one process.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>

#include "cli/case_list.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/progress.h"
#include "cli/result_file.h"
#include "harness/check.h"
#include "harness/endurance.h"
#include "harness/timing.h"

namespace chiasma::cli {
namespace {

constexpr const char* kDescription =
    "Times cases, each kernel in turn after the other, and checks every result before its time counts.\n"
    "\"cold\": caches are flushed before each call; \"loop\": calls back to back. Both are medians in microseconds, "
    "with\n"
    "the 10th and 90th percentile; n is the number of samples. TFLOPS counts the matrix products of the entries that\n"
    "are really selected, at the median of the loop.\n"
    "On a GPU then \"burst\", the fastest tenth of calls after a pause, and \"sustained\", calls back to back for\n"
    "seconds, with the clock, watts and joules a call of the latter: a GPU at its power limit lowers its clock.";
constexpr const char* kFooter =
    "Examples:\n"
    "  chiasma bench --case 'decode b=8 pool=16384' --json result.json\n"
    "  chiasma bench --cases cases/perf.cases --kernel NAME --kernel OTHER\n"
    "Without a case: one and eight requests of 128 heads and 2048 entries, from pools of 16384 tokens each.";
constexpr const char* kDefaultCases =
    "decode b=1 pool=16384 scale=amax\n"
    "decode b=8 pool=16384 scale=amax\n";

struct Options {
  CaseSources cases;
  std::string device = "auto", json;
  std::vector<std::string> kernels;
  double seconds = 3.0, sustained = 3.0;
  int threads = 0;
};

// One kernel on one case.
struct Entry {
  std::string kernel;
  std::unique_ptr<harness::Runner> runner;  // null: not run
  std::optional<harness::CheckReport> report;
  harness::Timing timing;
  std::optional<harness::Endurance> endurance;
  std::string problem;  // why it was not run, or what is wrong with its result
};

double selected_flops(const harness::Workload& workload) {
  const harness::Case& spec = workload.spec();
  std::size_t selected = 0;
  for (std::int64_t row = 0; row < spec.num_rows(); ++row) {
    for (const bool extra : {false, true}) selected += harness::selected_slots(workload.args(), row, extra).size();
  }
  harness::Case one_entry = spec;
  one_entry.b = one_entry.sq = one_entry.topk = 1;
  one_entry.xtopk = 0;
  return 2.0 * one_entry.multiply_adds() * static_cast<double>(selected);
}

Entry prepare(harness::Workload& workload, harness::Device& device, const std::string& kernel, const Options& options) {
  // The check only guards against timing a wrong kernel, so a few rows do.
  constexpr double kCheckMultiplyAdds = 1e9;
  Entry entry;
  entry.kernel = kernel.empty() ? "automatic" : kernel;
  harness::RunOptions run_options;
  run_options.kernel = kernel;
  run_options.num_threads = options.threads;
  harness::RunError error;
  workload.reset_outputs();
  std::unique_ptr<harness::Runner> runner = harness::Runner::make(workload, device, run_options, &error);
  if (runner != nullptr) entry.kernel = runner->kernel();
  if (runner == nullptr || !runner->launch(&error) || !runner->fetch(&error)) {
    entry.problem = error.message;
    return entry;
  }
  harness::CheckOptions check_options;
  check_options.max_multiply_adds = kCheckMultiplyAdds;
  entry.report = harness::check(workload, harness::tolerance_of(device.id().kind, workload.spec()), check_options);
  entry.problem = entry.report->failure;
  entry.runner = std::move(runner);
  return entry;
}

Json endurance_json(const harness::Endurance& endurance, double flops, const harness::Device& device) {
  Json json = {{"burst_us", endurance.burst_us},
               {"burst_samples", endurance.burst_samples},
               {"burst_tflops", flops / endurance.burst_us * 1e-6},
               {"sustained_us", endurance.sustained_us},
               {"sustained_calls", endurance.sustained_calls},
               {"sustained_tflops", flops / endurance.sustained_us * 1e-6}};
  if (endurance.sm_mhz) json["sm_mhz"] = *endurance.sm_mhz;
  if (endurance.joules_a_call) {
    json["watts"] = *endurance.watts;
    json["joules_a_call"] = *endurance.joules_a_call;
    if (flops > 0) json["pj_per_flop"] = *endurance.joules_a_call / flops * 1e12;
    json["clock_event_reasons"] = endurance.clock_event_reasons;
  } else {
    json["no_energy"] = device.meters() == nullptr ? "no meters for this kind of device" : device.meters()->why_not();
  }
  return json;
}

Json to_json(const Entry& entry, const harness::Case& spec, double flops) {
  Json json = {{"case", harness::to_line(spec)}, {"kernel", entry.kernel}};
  if (entry.runner == nullptr) {
    json["not_run"] = entry.problem;
    return json;
  }
  json["plan"] = entry.runner->plan_text();
  json["workspace_bytes"] = entry.runner->workspace_bytes();
  json["cold_us"] = statistics_json(entry.timing.cold);
  json["loop_us"] = statistics_json(entry.timing.loop);
  json["loop_us"]["calls_per_sample"] = entry.timing.calls_per_loop_sample;
  json["flop"] = flops;
  json["loop_tflops"] = entry.timing.loop.median > 0 ? flops / entry.timing.loop.median * 1e-6 : 0.0;
  json["sensors_before"] = facts_json(entry.timing.sensors_before);
  json["sensors_after"] = facts_json(entry.timing.sensors_after);
  if (entry.endurance) json["endurance"] = endurance_json(*entry.endurance, flops, entry.runner->device());
  json["error"] = report_json(*entry.report);
  return json;
}

std::string throughput_text(double flops, double microseconds) {
  if (microseconds <= 0) return "-";
  const double gflops = flops / microseconds * 1e-3;
  return gflops < 1000 ? fmt::format("{:.1f} GFLOPS", gflops) : fmt::format("{:.1f} TFLOPS", gflops * 1e-3);
}

std::string statistics_text(const char* name, const harness::Statistics& statistics) {
  return fmt::format("{} {:.1f} us [{:.1f} .. {:.1f}] min {:.1f} n {}", name, statistics.median, statistics.p10,
                     statistics.p90, statistics.min, statistics.n);
}

void print_endurance(const harness::Endurance& endurance, double flops, const harness::Device& device) {
  fmt::print("  {:<16} burst {:.1f} us, {}   sustained {:.1f} us, {}", "", endurance.burst_us,
             throughput_text(flops, endurance.burst_us), endurance.sustained_us,
             throughput_text(flops, endurance.sustained_us));
  if (endurance.joules_a_call) {
    fmt::print(", {:.0f} MHz, {:.0f} W, {:.3g} J a call{}{}\n", endurance.sm_mhz.value_or(0), *endurance.watts,
               *endurance.joules_a_call, endurance.clock_event_reasons.empty() ? "" : ", clock held down by ",
               fmt::join(endurance.clock_event_reasons, " and "));
  } else {
    fmt::print(", energy not measured: {}\n",
               device.meters() == nullptr ? "no meters for this kind of device" : device.meters()->why_not());
  }
}

void print_entry(const Entry& entry, double flops) {
  if (entry.runner == nullptr) {
    fmt::print("  {:<16} not run: {}\n", entry.kernel, entry.problem);
  } else if (!entry.problem.empty()) {
    fmt::print("  {:<16} WRONG, not timed: {}\n", entry.kernel, entry.problem);
  } else {
    fmt::print("  {:<16} {}   {}   {}   error {:.2e}\n", entry.kernel, statistics_text("cold", entry.timing.cold),
               statistics_text("loop", entry.timing.loop), throughput_text(flops, entry.timing.loop.median),
               entry.report->mean_relative_l2);
    if (entry.endurance) print_endurance(*entry.endurance, flops, entry.runner->device());
  }
}

class Bench {
 public:
  explicit Bench(const Options& options)
      : options_(options),
        kernels_(options.kernels.empty() ? std::vector<std::string>{""} : options.kernels),
        device_(open_device(options.device, kernels_.front())) {
    head_ = result_head("chiasma bench", *device_);
    head_["seconds_per_kernel"] = options.seconds;
    head_["results"] = Json::array();
    for (const auto& [key, value] : device_->describe()) fmt::print("# {}: {}\n", key, value);
    fmt::print("# chiasma {}, commit {}\n", chiasma_version(), git_commit());
  }

  void run(const harness::Case& spec, const std::string& place) {
    const std::string line = harness::to_line(spec);
    std::string error;
    std::vector<Entry> entries;
    std::unique_ptr<harness::Workload> workload;
    double flops = 0;
    {
      const Progress progress(fmt::format("case {}: {}", place, line));
      workload = harness::Workload::make(spec, &error);
      if (workload == nullptr) throw CommandError(kExitUnavailable, fmt::format("case '{}': {}", line, error));
      flops = selected_flops(*workload);
      for (const std::string& kernel : kernels_) entries.push_back(prepare(*workload, *device_, kernel, options_));
      time_entries(entries);
    }
    fmt::print("{}\n", line);
    for (const Entry& entry : entries) {
      print_entry(entry, flops);
      head_["results"].push_back(to_json(entry, spec, flops));
      any_wrong_ |= entry.runner != nullptr && !entry.problem.empty();
      any_not_run_ |= entry.runner == nullptr;
    }
    std::fflush(stdout);
  }

  const Json& json() const { return head_; }

  int exit_code() const {
    if (any_wrong_) return kExitCheckFailed;
    return any_not_run_ ? kExitUnavailable : kExitOk;
  }

 private:
  // Only those whose result was right.
  void time_entries(std::vector<Entry>& entries) const {
    std::vector<harness::Runner*> runners;
    std::vector<Entry*> timed;
    for (Entry& entry : entries) {
      if (entry.runner == nullptr || !entry.problem.empty()) continue;
      runners.push_back(entry.runner.get());
      timed.push_back(&entry);
    }
    harness::TimingOptions timing_options;
    timing_options.seconds_per_runner = options_.seconds;
    std::vector<harness::Timing> timings;
    harness::RunError error;
    if (!harness::time_runners(runners, timing_options, &timings, &error)) {
      throw CommandError(kExitUnavailable, error.message);
    }
    for (std::size_t n = 0; n < timed.size(); ++n) timed[n]->timing = timings[n];
    if (device_->meters() == nullptr || options_.sustained <= 0) return;
    harness::EnduranceOptions endurance_options;
    endurance_options.sustained_seconds = options_.sustained;
    for (Entry* entry : timed) {
      if (!harness::measure_endurance(*entry->runner, endurance_options, &entry->endurance.emplace(), &error)) {
        throw CommandError(kExitUnavailable, error.message);
      }
    }
  }

  const Options& options_;
  std::vector<std::string> kernels_;
  std::unique_ptr<harness::Device> device_;
  Json head_;
  bool any_wrong_ = false;
  bool any_not_run_ = false;
};

int run_bench(const Options& options) {
  const std::vector<harness::Case> cases = collect_cases(options.cases, kDefaultCases);
  ResultFile file(options.json);
  Bench bench(options);
  for (std::size_t n = 0; n < cases.size(); ++n) bench.run(cases[n], fmt::format("{} of {}", n + 1, cases.size()));
  file.write(bench.json());
  return bench.exit_code();
}

}  // namespace

void register_bench(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("bench", "Time kernels");
  command->description(kDescription);
  command->footer(kFooter);
  add_case_options(*command, options->cases);
  command->add_option("--kernel", options->kernels, "a name from `chiasma info`; repeatable, to compare")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command->add_option("--device", options->device, kDeviceHelp)->capture_default_str();
  command->add_option("--json", options->json, "write the results here, with machine, version, commit and errors")
      ->type_name("FILE");
  command->add_option("--seconds", options->seconds, "measuring time for each kernel and case")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command
      ->add_option("--sustained", options->sustained,
                   "seconds of the sustained run on a GPU; 0: neither that nor a burst")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "worker threads on the CPU; 0: all")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->callback([options, &exit_code] { exit_code = run_bench(*options); });
}

}  // namespace chiasma::cli
