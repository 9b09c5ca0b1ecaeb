// chiasma verify: runs cases and holds every result against the float64 oracle.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <array>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "cli/attention_example.h"
#include "cli/case_list.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/progress.h"
#include "cli/result_file.h"
#include "harness/check.h"
#include "harness/run.h"
#include "harness/smoke_cases.h"

namespace chiasma::cli {
namespace {

constexpr const char* kDescription =
    "Runs cases and compares every result with a float64 computation over the same stored bytes.\n"
    "Without --case, --cases or --activations it runs a built-in set that takes a few seconds.\n\n"
    "Prints one line a case: the verdict; the relative L2 error of out per row (mean, then largest); the worst "
    "element\n"
    "and the lse as a fraction of what is allowed; the rows that were checked; the kernel; the case.";
constexpr const char* kFooter =
    "Examples:\n"
    "  chiasma verify --case 'decode b=2 h=16 topk=65 scale=amax poison=nan layout=strided'\n"
    "  chiasma verify --cases cases/accuracy.cases --device cuda --json result.json\n"
    "The keys of a case line are explained in docs/cases.md.\n"
    "Exit codes: 0 all passed, 1 some failed, 2 a bad line, 3 something could not be run here.";

struct Options {
  CaseSources cases;
  std::string device = "auto", kernel, activations, json;
  bool all_rows = false;
};

enum class Verdict { kPassed, kFailed, kNotRun };

struct Outcome {
  Verdict verdict = Verdict::kPassed;
  std::string kernel;
  std::optional<harness::CheckReport> report;
  std::string message;  // of a failure
};

Outcome not_run(const std::string& message) {
  return {Verdict::kNotRun, {}, {}, message};
}

Outcome verify(const harness::Case& spec, harness::Device& device, const Options& options) {
  std::string error;
  const std::unique_ptr<harness::Workload> workload = harness::Workload::make(spec, &error);
  if (workload == nullptr) return not_run(error);

  Outcome outcome;
  harness::RunOptions run_options;
  run_options.kernel = options.kernel;
  harness::RunError run_error;
  if (!harness::run_case(*workload, device, run_options, &outcome.kernel, &run_error)) {
    const bool cannot = run_error.status == CHIASMA_UNSUPPORTED || run_error.status == CHIASMA_OUT_OF_MEMORY;
    outcome.verdict = cannot ? Verdict::kNotRun : Verdict::kFailed;
    outcome.message = run_error.message;
    return outcome;
  }
  const harness::Tolerance tolerance = harness::tolerance_of(device.id().kind, spec);
  harness::CheckOptions check_options;
  if (options.all_rows) check_options.max_multiply_adds = std::numeric_limits<double>::infinity();
  outcome.report = harness::check(*workload, tolerance, check_options);
  if (!outcome.report->passed) {
    outcome.verdict = Verdict::kFailed;
    outcome.message = outcome.report->failure;
  }
  return outcome;
}

Outcome verify(const AttentionExample& example, chiasma_scale_mode scale, harness::Device& device,
               const Options& options) {
  Outcome outcome;
  try {
    const ExampleResult result = work_through(example, {CHIASMA_KV_V32, scale}, device, options.kernel);
    outcome.kernel = result.kernel;
    outcome.report = result.kernel_error;
  } catch (const CommandError& error) {
    if (error.exit_code() != kExitUnavailable) throw;
    return not_run(error.what());
  }
  if (!outcome.report->passed) {
    outcome.verdict = Verdict::kFailed;
    outcome.message = outcome.report->failure;
  }
  return outcome;
}

void print_outcome(const Outcome& outcome, const std::string& line, const std::string& again) {
  const char* label = outcome.verdict == Verdict::kPassed   ? "pass"
                      : outcome.verdict == Verdict::kFailed ? "FAIL"
                                                            : "n/a ";
  if (outcome.report) {
    const harness::CheckReport& report = *outcome.report;
    fmt::print("{}  {:.2e} {:.2e}  {:4.2f} {:4.2f}  {}/{} rows  {}  {}\n", label, report.mean_relative_l2,
               report.max_relative_l2, report.worst_element, report.worst_lse, report.rows_checked, report.rows_total,
               outcome.kernel, line);
  } else {
    fmt::print("{}  {}\n", label, line);
  }
  if (outcome.verdict == Verdict::kNotRun) fmt::print("      not run: {}\n", outcome.message);
  if (outcome.verdict == Verdict::kFailed) {
    const std::string kernel = outcome.kernel.empty() ? "" : "--kernel " + outcome.kernel + " ";
    fmt::print("      {}\n      again: chiasma verify {}{}\n", outcome.message, kernel, again);
  }
  std::fflush(stdout);
}

// Counts, prints and keeps what verify() found.
class Findings {
 public:
  explicit Findings(const harness::Device& device) : json_(result_head("chiasma verify", device)) {
    json_["results"] = Json::array();
  }

  // what: the keys that say in a result file what was verified; again: the options that repeat it.
  void add(const Outcome& outcome, const std::string& line, const std::string& again, Json what) {
    print_outcome(outcome, line, again);
    ++counts_[static_cast<std::size_t>(outcome.verdict)];
    what["kernel"] = outcome.kernel;
    if (outcome.report) {
      what["error"] = report_json(*outcome.report);
    } else {
      what[outcome.verdict == Verdict::kNotRun ? "not_run" : "failure"] = outcome.message;
    }
    json_["results"].push_back(std::move(what));
  }

  int count(Verdict verdict) const { return counts_[static_cast<std::size_t>(verdict)]; }
  const Json& json() const { return json_; }

 private:
  std::array<int, 3> counts_{};
  Json json_;
};

void verify_cases(const Options& options, harness::Device& device, Findings& findings) {
  const std::vector<harness::Case> cases = collect_cases(options.cases, harness::kSmokeCases);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string line = harness::to_line(cases[n]);
    Outcome outcome;
    {
      const Progress progress(fmt::format("case {} of {}: {}", n + 1, cases.size(), line));
      outcome = verify(cases[n], device, options);
    }
    findings.add(outcome, line, fmt::format("--case '{}'", line), {{"case", line}});
  }
}

void verify_activations(const Options& options, harness::Device& device, Findings& findings) {
  const std::string name = std::filesystem::path(options.activations).filename().string();
  AttentionExample example;
  try {
    example = load_example(SafetensorsFile::open(options.activations), name);
  } catch (const SafetensorsError& error) {
    fail_input("--activations: {}", error.what());
  }
  for (const auto& [scale, scale_name] : {std::pair(CHIASMA_SCALE_POW2, "pow2"), {CHIASMA_SCALE_AMAX, "amax"}}) {
    const std::string line = fmt::format("activations {} scale={}", name, scale_name);
    Outcome outcome;
    {
      const Progress progress(line);
      outcome = verify(example, scale, device, options);
    }
    findings.add(outcome, line, "--activations " + options.activations, {{"activations", name}, {"scale", scale_name}});
  }
}

int run_verify(const Options& options) {
  ResultFile file(options.json);
  const std::unique_ptr<harness::Device> device = open_device(options.device, options.kernel);
  Findings findings(*device);
  const bool any_cases = !options.cases.lines.empty() || !options.cases.files.empty();
  if (any_cases || options.activations.empty()) verify_cases(options, *device, findings);
  if (!options.activations.empty()) verify_activations(options, *device, findings);
  file.write(findings.json());

  const int failed = findings.count(Verdict::kFailed);
  const int not_run_count = findings.count(Verdict::kNotRun);
  fmt::print("{} passed, {} failed", findings.count(Verdict::kPassed), failed);
  if (not_run_count > 0) fmt::print(", {} not run", not_run_count);
  fmt::print("\n");
  if (failed > 0) return kExitCheckFailed;
  return not_run_count > 0 ? kExitUnavailable : kExitOk;
}

}  // namespace

void register_verify(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("verify", "Check kernels against the float64 oracle");
  command->description(kDescription);
  command->footer(kFooter);
  add_case_options(*command, options->cases);
  command->add_option("--device", options->device, kDeviceHelp)->capture_default_str();
  command->add_option("--kernel", options->kernel, "a name from `chiasma info`; by default the best that fits");
  command
      ->add_option("--activations", options->activations,
                   "also a layer's activations, quantised with both kinds of scales: a safetensors file with q, kv, "
                   "indices and metadata sm_scale, as examples/ has one")
      ->type_name("FILE");
  command->add_option("--json", options->json, "write the results here, with machine, version, commit and errors")
      ->type_name("FILE");
  command->add_flag("--all-rows", options->all_rows, "check every row of big cases too, not a sample");
  command->callback([options, &exit_code] { exit_code = run_verify(*options); });
}

}  // namespace chiasma::cli
