// How near the cache operations and merge come to a GPU's copy bandwidth. Each case is one call over a gigabyte or
// more, timed by events; the copy that it is held against is measured in the same process, before and after.
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "bench/cache_ops_cases.h"
#include "chiasma/chiasma.hpp"
#include "cli/error.h"
#include "cli/result_file.h"
#include "harness/device.h"
#include "harness/nvml.h"
#include "harness/timing.h"

namespace chiasma::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kCopyBytes = std::int64_t{4} << 30;
constexpr int kWarmUpCalls = 5;
constexpr double kBatchUs = 50e3;  // of calls between two looks at the meters

struct Options {
  std::string json, commit, only, device = "cuda";
  int samples = 30;
  double sustained = 1.0;
};

// What meters say of calls back to back; absent without meters.
struct Sustained {
  double us = 0;  // a call
  std::optional<double> sm_mhz, watts, joules_a_call;
  std::vector<std::string> clock_event_reasons;
};

struct Result {
  std::string name, kernel;
  double bytes;
  harness::Statistics us;
  std::optional<Sustained> sustained;

  double gb_per_s() const { return bytes / us.median / 1e3; }
};

double time_calls(harness::Device& device, const CacheCase& work, int calls) {
  chiasma_status status = CHIASMA_OK;
  const double us = device.time_us([&] {
    for (int n = 0; n < calls && status == CHIASMA_OK; ++n) status = work.launch();
  });
  cli::check_status(status, work.name);
  return us / calls;
}

Sustained sustain(harness::Device& device, const CacheCase& work, double seconds, double one_call_us) {
  const harness::Nvml& meters = *device.meters();
  const int batch = std::max(1, static_cast<int>(kBatchUs / one_call_us));
  Sustained result;
  double total_us = 0;
  std::int64_t calls = 0;
  std::uint64_t reasons = 0;
  const auto begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const std::optional<double> energy_before = meters.energy_joules();
  do {
    total_us += time_calls(device, work, batch) * batch;
    calls += batch;
    reasons |= meters.clock_event_reasons();
    result.sm_mhz = meters.sm_mhz();
  } while (elapsed() < seconds);
  const std::optional<double> energy_after = meters.energy_joules();
  if (energy_before && energy_after) {
    result.watts = (*energy_after - *energy_before) / elapsed();
    result.joules_a_call = (*energy_after - *energy_before) / static_cast<double>(calls);
  }
  result.us = total_us / static_cast<double>(calls);
  result.clock_event_reasons = harness::clock_event_names(reasons);
  return result;
}

Result measure(harness::Device& device, const CacheCase& work, const Options& options) {
  for (int n = 0; n < kWarmUpCalls; ++n) time_calls(device, work, 1);
  // A result that is wrong has no time.
  if (!work.is_right()) cli::fail_input("{}: the result is not the CPU's", work.name);
  std::vector<double> samples;
  for (int n = 0; n < options.samples; ++n) samples.push_back(time_calls(device, work, 1));
  Result result{work.name, work.kernel, work.bytes, harness::summarize(samples), std::nullopt};
  if (options.sustained > 0) result.sustained = sustain(device, work, options.sustained, result.us.median);
  return result;
}

CacheCase copy_case(harness::Device& device) {
  const harness::DeviceBlock from = device.allocate(kCopyBytes), to = device.allocate(kCopyBytes);
  if (from == nullptr || to == nullptr) cli::fail_input("not enough device memory for a copy of {} bytes", kCopyBytes);
  device.fill(from.get(), 0x35, kCopyBytes);
  CacheCase copy{"copy", "cudaMemcpyAsync", 2.0 * kCopyBytes, {}, [] { return true; }};
  copy.launch = [from, to] {
    return cudaMemcpyAsync(to.get(), from.get(), kCopyBytes, cudaMemcpyDeviceToDevice, nullptr) == cudaSuccess
               ? CHIASMA_OK
               : CHIASMA_DEVICE_ERROR;
  };
  return copy;
}

std::string or_dash(const std::optional<double>& value, const char* format) {
  return value ? fmt::format(fmt::runtime(format), *value) : "-";
}

void print(const Result& result, double copy_gb_per_s) {
  const Sustained meters = result.sustained.value_or(Sustained{});
  fmt::print("{:36} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>9.1f} {:>8.0f} {:>6.1f} {:>6} {:>6} {:>7}\n", result.name,
             result.us.median, result.us.min, result.us.p10, result.us.p90, result.bytes / 1e6, result.gb_per_s(),
             100 * result.gb_per_s() / copy_gb_per_s, or_dash(meters.sm_mhz, "{:.0f}"), or_dash(meters.watts, "{:.0f}"),
             or_dash(meters.joules_a_call, "{:.3f}"));
  std::fflush(stdout);
}

cli::Json to_json(const Result& result, double copy_gb_per_s) {
  cli::Json json = {{"case", result.name},           {"kernel", result.kernel},
                    {"bytes", result.bytes},         {"us", cli::statistics_json(result.us)},
                    {"gb_per_s", result.gb_per_s()}, {"percent_of_copy", 100 * result.gb_per_s() / copy_gb_per_s}};
  if (!result.sustained) return json;
  const Sustained& sustained = *result.sustained;
  json["sustained_us"] = sustained.us;
  if (sustained.sm_mhz) json["sm_mhz"] = *sustained.sm_mhz;
  if (sustained.watts) json["watts"] = *sustained.watts;
  if (sustained.joules_a_call) json["joules_a_call"] = *sustained.joules_a_call;
  json["clock_event_reasons"] = sustained.clock_event_reasons;
  return json;
}

void run(const Options& options) {
  std::string error;
  const std::unique_ptr<harness::Device> device = harness::open_device(options.device, &error);
  if (device == nullptr || device->id().kind != CHIASMA_CUDA) {
    throw cli::CommandError(cli::kExitUnavailable, device == nullptr ? error : "--device must be cuda or cuda:N");
  }
  cli::ResultFile file(options.json);
  cli::Json json = cli::result_head("chiasma_cache_bench", *device);
  if (!options.commit.empty()) json["commit"] = options.commit;
  json["counting"] = "bytes: each input read once, each output written once; copy: bytes read and bytes written";
  json["sensors_before"] = cli::facts_json(device->sensors());
  json["results"] = cli::Json::array();

  fmt::print("{:36} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8} {:>6} {:>6} {:>6} {:>7}\n", "case", "median us", "min", "p10",
             "p90", "MB", "GB/s", "% copy", "MHz", "W", "J/call");
  const auto add = [&](const Result& result, double copy_gb_per_s) {
    print(result, copy_gb_per_s);
    json["results"].push_back(to_json(result, copy_gb_per_s));
  };
  const Result copy = measure(*device, copy_case(*device), options);
  add(copy, copy.gb_per_s());
  for (const CaseMaker& maker : cache_cases()) {
    if (maker.name.find(options.only) == std::string::npos) continue;
    add(measure(*device, maker.make(*device), options), copy.gb_per_s());
  }
  Result again = measure(*device, copy_case(*device), options);
  again.name = "copy, once more";
  add(again, copy.gb_per_s());
  json["sensors_after"] = cli::facts_json(device->sensors());
  file.write(json);
}

}  // namespace
}  // namespace chiasma::bench

int main(int argc, char** argv) {
  chiasma::bench::Options options;
  CLI::App app("Times the cache operations and merge on a GPU against its copy bandwidth.");
  app.add_option("--json", options.json, "file for the results");
  app.add_option("--commit", options.commit, "commit to name in the file, where the build could not tell it");
  app.add_option("--only", options.only, "cases whose name has this in it");
  app.add_option("--device", options.device, "cuda or cuda:N")->capture_default_str();
  app.add_option("--samples", options.samples, "timed calls of a case")
      ->check(CLI::Range(20, 10000))
      ->capture_default_str();
  app.add_option("--sustained", options.sustained, "seconds of calls back to back for the meters; 0: none")
      ->check(CLI::Range(0.0, 60.0))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    chiasma::bench::run(options);
  } catch (const chiasma::cli::CommandError& error) {
    fmt::print(stderr, "chiasma_cache_bench: {}\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) {
    fmt::print(stderr, "chiasma_cache_bench: {}\n", error.what());
    return chiasma::cli::kExitUnavailable;
  }
  return chiasma::cli::kExitOk;
}
