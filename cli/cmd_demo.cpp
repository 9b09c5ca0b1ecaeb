// `chiasma demo`: the whole job in a few seconds, with numbers that show whether it is right.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "cli/attention_example.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/progress.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

constexpr const char* kDescription =
    R"(Quantises two small KV caches, decodes them on the best device and checks the results.

"real" is one query token of a language model's attention layer, "random" is normally distributed. Each
is quantised with both kinds of scales, or with --formats to every cache format. Errors are relative L2 of
a head's output:
  kernel        decoded results against a float64 computation over the same quantised cache
  quantisation  that computation against the same over the unquantised bf16 cache
Formats with 512 columns have the last 512 of the 576, or the first 512 where they have no rotary ones.)";

struct Options {
  std::string device = "auto";
  bool all_formats = false;
  bool markdown = false;
};

std::vector<CacheKind> kinds_of(const Options& options) {
  std::vector<CacheKind> kinds;
  for (const KvFormat each : kAllFormats) {
    const auto format = static_cast<chiasma_kv_format>(each);
    if (!options.all_formats && format != CHIASMA_KV_V32) continue;
    kinds.push_back({format, CHIASMA_SCALE_POW2});
    if (traits_of(each).scale_type == ScaleType::float32) kinds.push_back({format, CHIASMA_SCALE_AMAX});
  }
  return kinds;
}

const char* name_of_scales(CacheKind kind) {
  switch (traits_of(static_cast<KvFormat>(kind.format)).scale_type) {
    case ScaleType::none: return "none";
    case ScaleType::cache: return "one";
    default: return kind.scale == CHIASMA_SCALE_POW2 ? "pow2" : "amax";
  }
}

class Table {
 public:
  explicit Table(bool markdown) : markdown_(markdown) {
    if (markdown_) {
      fmt::print("| cache | format | scales | kernel's error, mean / max | quantisation's error, mean / max |\n");
      fmt::print("|---|---|---|---|---|\n");
      return;
    }
    fmt::print("{:<47}{:>26}   {:<29}   {:<18}\n", "", "", "kernel error", "quantisation error");
    fmt::print("{:<7} {:<15} {:<5} {:>5} {:>5}  {:<18} {:>7}   {:<8}  {:<8}  {:<7}   {:<8}  {:<8}   {}\n", "cache",
               "format", "scale", "heads", "topk", "kernel", "ms", "mean", "max", "lse", "mean", "max", "check");
  }

  void add(const AttentionExample& example, CacheKind kind, const ExampleResult& result) const {
    const harness::CheckReport& error = result.kernel_error;
    const char* format = chiasma_kv_format_name(kind.format);
    if (markdown_) {
      fmt::print("| {} | `{}` | {} | {:.2e} / {:.2e} | {:.2e} / {:.2e} |\n", example.name, format, name_of_scales(kind),
                 error.mean_relative_l2, error.max_relative_l2, result.quantisation_mean, result.quantisation_max);
    } else {
      fmt::print("{:<7} {:<15} {:<5} {:>5} {:>5}  {:<18} {:>7.2f}   {:.2e}  {:.2e}  {:.1e}   {:.2e}  {:.2e}   {}\n",
                 example.name, format, name_of_scales(kind), example.q_shape[2], example.indices_shape[2],
                 result.kernel, result.milliseconds, error.mean_relative_l2, error.max_relative_l2, error.max_lse_error,
                 result.quantisation_mean, result.quantisation_max, error.passed ? "ok" : "WRONG");
    }
    if (!error.passed) fmt::print(stderr, "{} {}: {}\n", example.name, format, error.failure);
  }

 private:
  bool markdown_;
};

std::string name_of_device(harness::Device& device) {
  chiasma_device_info info{};
  for (std::int32_t number = 0; number < chiasma_device_count(); ++number) {
    if (chiasma_device_query(number, &info) != CHIASMA_OK || info.device.kind != device.id().kind) continue;
    if (info.device.index == device.id().index) return info.name;
  }
  return "unknown";
}

int run_demo(const Options& options) {
  const std::unique_ptr<harness::Device> device = open_device(options.device, "");
  if (!options.markdown) fmt::print("chiasma {} on {}\n\n", chiasma_version(), name_of_device(*device));
  const Table table(options.markdown);
  bool all_passed = true;
  std::string not_run;
  for (const AttentionExample& example : {real_example(), random_example()}) {
    for (const CacheKind kind : kinds_of(options)) {
      ExampleResult result;
      try {
        const Progress progress(fmt::format("{} cache, {}, {} scales", example.name,
                                            chiasma_kv_format_name(kind.format), name_of_scales(kind)));
        result = work_through(example, kind, *device);
      } catch (const CommandError& error) {
        if (!options.all_formats || error.exit_code() != kExitUnavailable) throw;
        not_run += fmt::format("not run: {}\n", error.what());
        continue;
      }
      table.add(example, kind, result);
      all_passed &= result.kernel_error.passed;
    }
  }
  fmt::print(stderr, "{}", not_run);
  if (!options.markdown) {
    fmt::print("\n{}\n", all_passed ? "All results are within tolerance of the float64 oracle."
                                    : "Some results are wrong; please report the output above.");
  }
  return all_passed ? kExitOk : kExitCheckFailed;
}

}  // namespace

void register_demo(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("demo", "Quantise, decode and check two small caches");
  command->description(kDescription);
  command->add_option("--device", options->device, kDeviceHelp)->capture_default_str();
  command->add_flag("--formats", options->all_formats, "every cache format instead of v32 alone");
  command->add_flag("--markdown", options->markdown, "nothing but a table of the errors, for documents");
  command->callback([options, &exit_code] { exit_code = run_demo(*options); });
}

}  // namespace chiasma::cli
