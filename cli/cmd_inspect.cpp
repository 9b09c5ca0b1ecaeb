// `chiasma inspect`: what a file holds and what decode would do with it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <string>

#include "cli/cache_tensor.h"
#include "cli/commands.h"
#include "cli/decode_input.h"
#include "cli/decode_job.h"
#include "cli/device.h"
#include "cli/error.h"
#include "cli/findings.h"
#include "cli/input_parts.h"
#include "cli/safetensors.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

struct Options {
  std::string input;
  bool all = false;
};

bool is_cache_name(const std::string& name) {
  return name == "kv_cache" || name == "extra_kv_cache";
}
bool is_indices_name(const std::string& name) {
  return name == "indices" || name == "extra_indices";
}

std::string range_text(const Range& range) {
  return range.least > range.most ? "none" : fmt::format("{:.6g} to {:.6g}", range.least, range.most);
}

std::string coverage_text(std::int64_t looked_at, std::int64_t total) {
  return looked_at == total ? ""
                            : fmt::format(" (of {} looked at, evenly spaced; --all looks at every one)", looked_at);
}

// Of the largest power of two, up to a page of memory, that an address is a multiple of.
std::int64_t alignment_of(std::uint64_t offset) {
  constexpr std::uint64_t kMost = 4096;
  return static_cast<std::int64_t>(offset == 0 ? kMost : std::min(kMost, offset & ~(offset - 1)));
}

void print_numbers(const SafetensorsFile& file, const SafetensorsTensor& tensor, bool all) {
  const NumberFindings findings = look_at_numbers(file, tensor, all);
  if (findings.looked_at == 0) return;
  const std::int64_t total = std::ssize(tensor.data) / (dtype_bits(tensor.dtype) / 8);
  fmt::print("      {}; {} NaN, {} infinite{}\n", range_text(findings.range), findings.nan, findings.infinite,
             coverage_text(findings.looked_at, total));
}

const char* convention_of(const CacheFindings& findings) {
  const std::int64_t not_zero = findings.scales - findings.zero_scales;
  if (not_zero == 0) return "all zero";
  if (findings.powers_of_two == not_zero) return "powers of two, as pow2 chooses them";
  return findings.powers_of_two * 2 < not_zero ? "any numbers, as amax chooses them"
                                               : "mostly powers of two, but not all";
}

void print_cache(const SafetensorsFile& file, const std::string& name, bool all) {
  const CacheTensor cache = read_cache(file, name, name == "kv_cache" ? "page" : "extra_page");
  const RowTraits traits = traits_of(static_cast<KvFormat>(cache.format));
  const CacheFindings findings = look_at_cache(file, cache, all);
  fmt::print("      format {}: {} pages of {} tokens, {} bytes apart, {} slots\n", traits.name, cache.tensor.shape[0],
             cache.tensor.shape[1], cache.tensor.stride[0] * (traits.is_quantized() ? 1 : 2), findings.slots);
  if (findings.looked_at == 0) return;
  const std::string coverage = coverage_text(findings.looked_at, findings.slots);
  if (traits.is_quantized()) fmt::print("      {} codes are NaN{}\n", findings.nan_codes, coverage);
  if (traits.bf16_columns > 0)
    fmt::print("      {} bf16 numbers are NaN or infinite{}\n", findings.nonfinite_bf16, coverage);
  if (findings.scales == 0) return;
  fmt::print("      scales: {}; {}; {} zero, {} negative, NaN or infinite{}\n", convention_of(findings),
             range_text(findings.scale_range), findings.zero_scales, findings.bad_scales, coverage);
}

void print_indices(const SafetensorsFile& file, const SafetensorsTensor& tensor) {
  const std::string cache_name = tensor.name == "indices" ? "kv_cache" : "extra_kv_cache";
  if ((tensor.dtype != Dtype::kI32 && tensor.dtype != Dtype::kI64) || file.find(cache_name) == nullptr) return;
  const CacheTensor cache = read_cache(file, cache_name, cache_name == "kv_cache" ? "page" : "extra_page");
  const IndexFindings findings = look_at_indices(tensor, num_slots(cache.tensor));
  fmt::print("      {} of {} entries are slots of {}, {}\n", findings.valid, findings.entries, cache_name,
             range_text(findings.range));
  fmt::print("      masked: {} are -1, {} other negative numbers, {} beyond the cache\n", findings.minus_one,
             findings.other_negative, findings.beyond);
  fmt::print("      {} of {} rows have no slot at all\n", findings.empty_rows, findings.rows);
}

void print_tensor(const SafetensorsFile& file, const SafetensorsTensor& tensor, std::uint64_t offset, bool all) {
  fmt::print("  {}: {}, {} bytes from byte {} (a multiple of {})\n", printable(tensor.name), describe(tensor),
             tensor.data.size(), offset, alignment_of(offset));
  try {
    if (is_cache_name(tensor.name)) return print_cache(file, tensor.name, all);
    if (is_indices_name(tensor.name)) return print_indices(file, tensor);
    if (has_numbers(tensor.dtype)) print_numbers(file, tensor, all);
  } catch (const CommandError& error) {
    fmt::print("      {}\n", error.what());
  }
}

void print_plan(const DecodeInput& input, const std::string& device_name, const std::string& path) {
  const std::unique_ptr<harness::Device> device = open_device(device_name, "");
  const DeviceTensors tensors(*device);
  chiasma_decode_args args = input.args();
  const DecodePlanPointer plan = plan_decode(args, input.tensors(), tensors, {}, path);
  fmt::print("{}", chiasma_decode_plan_text(plan.get()));
}

// As `chiasma decode` chooses: the best device that can do it.
void print_decode(const SafetensorsFile& file) {
  fmt::print("decode:\n");
  try {
    const DecodeInput input(file, {.sm_scale = std::nullopt, .cast = true});
    for (const std::string& note : input.notes()) fmt::print("note: {}\n", note);
    for (const std::string& conversion : input.conversions()) fmt::print("with --cast: {}\n", conversion);
    fmt::print("sm_scale: {}\n", input.args().sm_scale);
    try {
      print_plan(input, "auto", file.path());
    } catch (const CommandError& error) {
      if (error.exit_code() != kExitUnavailable || chiasma_cuda_available() != CHIASMA_OK) throw;
      fmt::print("note: {}; on the CPU instead\n", error.what());
      print_plan(input, "cpu", file.path());
    }
  } catch (const CommandError& error) {
    fmt::print("refused: {}\n", error.what());
  }
}

void run_inspect(const Options& options) {
  const SafetensorsFile file = SafetensorsFile::open(options.input);
  fmt::print("{}: {} tensors, whose data begins at byte {}\n", file.path(), file.tensors().size(), file.data_offset());
  for (const auto& [key, value] : file.metadata()) fmt::print("  metadata {}: {}\n", printable(key), printable(value));
  for (const SafetensorsTensor& tensor : file.tensors()) {
    print_tensor(file, tensor, file.offset_of(tensor), options.all);
  }
  print_decode(file);
}

constexpr const char* kHelp = R"(Says what a safetensors file holds and what `chiasma decode` would do with it.

For each tensor: dtype, shape, where it begins and how that is aligned; of numbers the range and
how many are NaN or infinite; of a cache the format, how its scales were chosen and how many codes
are NaN; of indices how many select a slot and why the others do not. Of large tensors 64 stretches
are looked at, evenly spaced. Then the plan of decode, or why it would refuse the file.)";

}  // namespace

void register_inspect(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("inspect", "What a file holds and what decode would do with it");
  command->description(kHelp);
  command->add_option("FILE", options->input, "safetensors file to read")->required();
  command->add_flag("--all", options->all, "look at all of every tensor, however large");
  command->callback([options, &exit_code] {
    run_inspect(*options);
    exit_code = kExitOk;
  });
}

}  // namespace chiasma::cli
