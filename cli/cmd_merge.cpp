// `chiasma merge`: the outputs of several decodes over disjoint sets of KV tokens, put together.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/decode_job.h"
#include "cli/error.h"
#include "cli/input_parts.h"
#include "cli/progress.h"
#include "cli/safetensors.h"

namespace chiasma::cli {
namespace {

constexpr chiasma_device kCpu{CHIASMA_CPU, 0};
constexpr std::size_t kPieceBytes = std::size_t{16} << 20;
constexpr const char* kScaleKey = "sm_scale";

struct Options {
  std::vector<std::string> inputs;
  std::string output;
  bool plus_infinity_is_empty = false;
};

struct Part {
  SafetensorsFile file;
  const SafetensorsTensor* out;
  const SafetensorsTensor* lse;
};

Part open_part(const std::string& path) {
  Part part{SafetensorsFile::open(path), nullptr, nullptr};
  part.out = &require(part.file, "out");
  part.lse = &require(part.file, "lse");
  const std::vector<std::int64_t>& shape = part.out->shape;
  if ((part.out->dtype != Dtype::kBF16 && part.out->dtype != Dtype::kF32) || shape.size() < 2 ||
      shape.back() != kOutputWidth) {
    fail_input("{}: out is {}; must be BF16 or F32 [b, s_q, h_q, {}] or [b, h_q, {}]", path, describe(*part.out),
               kOutputWidth, kOutputWidth);
  }
  if (part.lse->dtype != Dtype::kF32 ||
      !std::equal(shape.begin(), shape.end() - 1, part.lse->shape.begin(), part.lse->shape.end())) {
    fail_input("{}: lse is {} beside out {}; must be F32 of the same shape without the last extent", path,
               describe(*part.lse), describe(*part.out));
  }
  const std::string* sink = find_metadata(part.file, kSinkKey);
  if (sink != nullptr && *sink == kSinkApplied) {
    fail_input(
        "{}: a sink has been applied (metadata \"{}\"), which every part would then count; decode without attn_sink "
        "and "
        "apply it to the merged result",
        path, kSinkKey);
  }
  return part;
}

// Parts of one call have one shape, dtype and softmax scale.
void check_alike(const Part& first, const Part& part) {
  if (part.out->dtype != first.out->dtype || part.out->shape != first.out->shape) {
    fail_input("{}: out is {}, but that of {} is {}; all parts must be alike", part.file.path(), describe(*part.out),
               first.file.path(), describe(*first.out));
  }
  const std::string* scale = find_metadata(part.file, kScaleKey);
  const std::string* first_scale = find_metadata(first.file, kScaleKey);
  if (scale != nullptr && first_scale != nullptr && *scale != *first_scale) {
    fail_input("{}: metadata \"{}\" is \"{}\", but that of {} is \"{}\"; parts of one call have one", part.file.path(),
               kScaleKey, printable(*scale), first.file.path(), printable(*first_scale));
  }
}

// Memory for some rows of all parts and of the result.
struct Buffers {
  std::size_t parts, row_bytes;
  std::vector<std::byte> part_out, out;
  std::vector<float> part_lse, lse;

  Buffers(std::size_t num_parts, std::size_t bytes_of_row, std::size_t rows)
      : parts(num_parts),
        row_bytes(bytes_of_row),
        part_out(num_parts * rows * bytes_of_row),
        out(rows * bytes_of_row),
        part_lse(num_parts * rows),
        lse(rows) {}

  void load(const std::vector<Part>& from, std::size_t first, std::size_t rows) {
    for (std::size_t i = 0; i < from.size() && rows > 0; ++i) {
      const auto part = from[i].out->data.subspan(first * row_bytes, rows * row_bytes);
      std::memcpy(part_out.data() + i * part.size(), part.data(), part.size());
      from[i].file.release(part);
      std::memcpy(part_lse.data() + i * rows, from[i].lse->data.data() + first * sizeof(float), rows * sizeof(float));
    }
  }

  void merge(chiasma_dtype dtype, std::size_t rows, bool plus_infinity_is_empty, const std::string& where) {
    const std::array<std::int64_t, 5> shape{static_cast<std::int64_t>(parts), static_cast<std::int64_t>(rows), 1, 1,
                                            kOutputWidth};
    chiasma_merge_args args{};
    args.part_out = chiasma_contiguous(part_out.data(), dtype, kCpu, 5, shape.data());
    args.part_lse = chiasma_contiguous(part_lse.data(), CHIASMA_FLOAT32, kCpu, 4, shape.data());
    args.out = chiasma_contiguous(out.data(), dtype, kCpu, 4, shape.data() + 1);
    args.lse = chiasma_contiguous(lse.data(), CHIASMA_FLOAT32, kCpu, 3, shape.data() + 1);
    args.plus_infinity_is_empty = plus_infinity_is_empty ? 1 : 0;
    check_status(chiasma_merge(&args, nullptr), where);
  }
};

// A file whose tokens would count twice.
void check_not_twice(const std::vector<std::string>& paths) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      std::error_code error;  // of files that are not there, which opening them will tell
      if (std::filesystem::equivalent(paths[i], paths[j], error)) {
        fail_input("{} and {} are one file, whose tokens would count twice", paths[j], paths[i]);
      }
    }
  }
}

// It would make rows NaN without a word, where its writer most likely means a part without tokens.
void check_no_plus_infinity(const Part& part) {
  for (std::size_t row = 0; row < part.lse->data.size() / sizeof(float); ++row) {
    float lse = 0;
    std::memcpy(&lse, part.lse->data.data() + row * sizeof lse, sizeof lse);
    if (lse != std::numeric_limits<float>::infinity()) continue;
    fail_input(
        "{}: lse is +inf in row {}; if that is how its writer says that a part is empty, give "
        "--plus-infinity-is-empty",
        part.file.path(), row);
  }
}

void note_nan(const std::vector<float>& lse) {
  const auto num_nan = std::ranges::count_if(lse, [](float value) { return std::isnan(value); });
  if (num_nan == 0) return;
  fmt::print(stderr, "chiasma: note: {} of {} rows are NaN, as the lse of a part is\n", num_nan, lse.size());
}

void run_merge(const Options& options) {
  std::vector<Part> parts;
  check_not_twice(options.inputs);
  parts.reserve(options.inputs.size());  // each points into its own file
  for (const std::string& path : options.inputs) {
    parts.push_back(open_part(path));
    check_alike(parts.front(), parts.back());
    if (!options.plus_infinity_is_empty) check_no_plus_infinity(parts.back());
  }
  const SafetensorsTensor& like = *parts.front().out;
  const std::size_t num_rows = parts.front().lse->data.size() / sizeof(float);
  const std::size_t row_bytes = static_cast<std::size_t>(kOutputWidth * dtype_bits(like.dtype) / 8);
  const std::size_t rows_at_once =
      std::min(num_rows, std::max<std::size_t>(1, kPieceBytes / (row_bytes * parts.size())));

  SafetensorsWriter writer;
  SafetensorsMetadata metadata{{"version", chiasma_version()}, {"parts", fmt::format("{}", parts.size())}};
  for (const Part& part : parts) {
    if (const std::string* scale = find_metadata(part.file, kScaleKey)) metadata[kScaleKey] = *scale;
  }
  writer.set_metadata(std::move(metadata));
  writer.declare("out", like.dtype, like.shape);
  writer.declare("lse", Dtype::kF32, parts.front().lse->shape);
  writer.begin(options.output);

  Progress progress("merging", static_cast<std::int64_t>(num_rows));
  Buffers buffers(parts.size(), row_bytes, rows_at_once);
  std::vector<float> lse;
  lse.reserve(num_rows);
  for (std::size_t first = 0; first < num_rows; first += rows_at_once) {
    const std::size_t rows = std::min(rows_at_once, num_rows - first);
    buffers.load(parts, first, rows);
    buffers.merge(like.dtype == Dtype::kBF16 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, rows, options.plus_infinity_is_empty,
                  options.output);
    writer.write(std::span(buffers.out).first(rows * row_bytes));
    lse.insert(lse.end(), buffers.lse.begin(), buffers.lse.begin() + static_cast<std::ptrdiff_t>(rows));
    progress.advance(static_cast<std::int64_t>(rows));
  }
  writer.write(std::as_bytes(std::span(lse)));
  for (const Part& part : parts) part.file.check_length();
  writer.commit();
  note_nan(lse);
}

constexpr const char* kHelp = R"(Merges the outputs of several decodes of the same queries over different KV tokens.

Each input has out, BF16 or F32 [b, s_q, h_q, 512] or [b, h_q, 512], and lse, F32 without the last
extent, as `chiasma decode` writes them. The result has the same shapes and dtypes:
  lse = log(sum of exp(lse of a part)), out = sum of exp(lse of a part - lse) * out of that part,
in float64, so that the order of parts hardly matters. A part whose lse is -inf is empty. Sinks
belong into none of the parts; apply them to the result.)";

}  // namespace

void register_merge(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("merge", "Merges outputs of decode over different KV tokens");
  command->description(kHelp);
  command->add_option("--input", options->inputs, "safetensors files to read, one a part")->required();
  command->add_option("--output", options->output, "safetensors file to write; replaced only when complete")
      ->required();
  command->add_flag(
      "--plus-infinity-is-empty", options->plus_infinity_is_empty,
      "an lse of +inf, too, says that a part is empty (some kernels write that); otherwise it is refused");
  command->callback([options, &exit_code] {
    run_merge(*options);
    exit_code = kExitOk;
  });
}

}  // namespace chiasma::cli
