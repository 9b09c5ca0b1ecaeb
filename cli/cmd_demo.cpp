// `chiasma demo`: the whole job in a few seconds, with numbers that show whether it is right.
#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "cli/attention_example.h"
#include "cli/commands.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/progress.h"

namespace chiasma::cli {
namespace {

constexpr const char* kDescription =
    R"(Quantises two small KV caches, decodes them on the best device and checks the results.

"real" is one query token of a language model's attention layer, "random" is normally distributed. Each
is quantised with both kinds of scales. Errors are relative L2 of a head's output:
  kernel        decoded results against a float64 computation over the same quantised cache
  quantisation  that computation against the same over the unquantised bf16 cache)";

void print_result(const AttentionExample& example, const char* scale, const ExampleResult& result) {
  const harness::CheckReport& error = result.kernel_error;
  fmt::print("{:<7} {:<5} {:>5} {:>5}  {:<18} {:>7.2f}   {:.2e}  {:.2e}  {:.1e}   {:.2e}  {:.2e}   {}\n", example.name,
             scale, example.q_shape[2], example.indices_shape[2], result.kernel, result.milliseconds,
             error.mean_relative_l2, error.max_relative_l2, error.max_lse_error, result.quantisation_mean,
             result.quantisation_max, error.passed ? "ok" : "WRONG");
  if (!error.passed) fmt::print("        {}\n", error.failure);
}

int run_demo(const std::string& device_name) {
  const std::unique_ptr<harness::Device> device = open_device(device_name, "");
  chiasma_device_info info{};
  std::string name = "unknown";
  for (std::int32_t number = 0; number < chiasma_device_count(); ++number) {
    if (chiasma_device_query(number, &info) != CHIASMA_OK || info.device.kind != device->id().kind) continue;
    if (info.device.index == device->id().index) name = info.name;
  }
  fmt::print("chiasma {} on {}\n\n", chiasma_version(), name);
  fmt::print("{:<31}{:>26}   {:<29}   {:<18}\n", "", "", "kernel error", "quantisation error");
  fmt::print("{:<7} {:<5} {:>5} {:>5}  {:<18} {:>7}   {:<8}  {:<8}  {:<7}   {:<8}  {:<8}   {}\n", "cache", "scale",
             "heads", "topk", "kernel", "ms", "mean", "max", "lse", "mean", "max", "check");
  bool all_passed = true;
  for (const AttentionExample& example : {real_example(), random_example()}) {
    for (const auto& [scale, scale_name] : {std::pair(CHIASMA_SCALE_POW2, "pow2"), {CHIASMA_SCALE_AMAX, "amax"}}) {
      ExampleResult result;
      {
        const Progress progress(fmt::format("{} cache, {} scales", example.name, scale_name));
        result = work_through(example, scale, *device);
      }
      print_result(example, scale_name, result);
      all_passed &= result.kernel_error.passed;
    }
  }
  fmt::print("\n{}\n", all_passed ? "All results are within tolerance of the float64 oracle."
                                  : "Some results are wrong; please report the output above.");
  return all_passed ? kExitOk : kExitCheckFailed;
}

}  // namespace

void register_demo(CLI::App& app, int& exit_code) {
  auto device = std::make_shared<std::string>("auto");
  CLI::App* command = app.add_subcommand("demo", "Quantise, decode and check two small caches");
  command->description(kDescription);
  command->add_option("--device", *device, kDeviceHelp)->capture_default_str();
  command->callback([device, &exit_code] { exit_code = run_demo(*device); });
}

}  // namespace chiasma::cli
