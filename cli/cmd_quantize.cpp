// `chiasma quantize` and `chiasma dequantize`: whole caches from file to file, some pages at a time, so that neither
// memory nor the output ever holds more than a piece.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/cache_tensor.h"
#include "cli/commands.h"
#include "cli/error.h"
#include "cli/progress.h"
#include "cli/safetensors.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

constexpr chiasma_device kCpu{CHIASMA_CPU, 0};
constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;

struct Options {
  std::string input, output;
  std::string scale = "pow2", format = "v32";
  std::optional<double> kv_scale;
};

// Storage for pieces, aligned for the C interface.
class Piece {
 public:
  explicit Piece(std::int64_t bytes)
      : data_(static_cast<std::size_t>(bytes) / sizeof(std::max_align_t) + 1),
        bytes_(static_cast<std::size_t>(bytes)) {}
  std::byte* data() { return reinterpret_cast<std::byte*>(data_.data()); }
  std::span<std::byte> first(std::int64_t bytes) { return {data(), static_cast<std::size_t>(bytes)}; }
  void load(std::span<const std::byte> from) {
    if (!from.empty()) std::memcpy(data(), from.data(), std::min(from.size(), bytes_));
  }

 private:
  std::vector<std::max_align_t> data_;
  std::size_t bytes_;
};

// Calls work(first page, number of pages) until all pages are done; once for no pages, so that their shape is checked.
template <typename Work>
void for_each_piece(const char* what, std::int64_t num_pages, std::int64_t bytes_per_page, const Work& work) {
  Progress progress(what, num_pages);
  const std::int64_t pages_per_piece =
      std::max<std::int64_t>(1, kPieceBytes / std::max<std::int64_t>(1, bytes_per_page));
  std::int64_t page = 0;
  do {
    const std::int64_t count = std::min(pages_per_piece, num_pages - page);
    work(page, count);
    progress.advance(count);
    page += count;
  } while (page < num_pages);
}

std::span<const std::byte> pages_of(std::span<const std::byte> bytes, std::int64_t page, std::int64_t count,
                                    std::int64_t bytes_per_page) {
  return bytes.subspan(static_cast<std::size_t>(page * bytes_per_page),
                       static_cast<std::size_t>(count * bytes_per_page));
}

// Declares, behind the result, every tensor of the input but the one that the result replaces.
void declare_others(const SafetensorsFile& file, const std::string& replaced, const std::string& result,
                    SafetensorsWriter& writer) {
  for (const SafetensorsTensor& tensor : file.tensors()) {
    if (tensor.name == replaced) continue;
    if (tensor.name == result) {
      fail_input("{}: has a tensor {} already; it would be written twice", file.path(), result);
    }
    writer.declare(tensor.name, tensor.dtype, tensor.shape);
  }
}

void write_others(const SafetensorsFile& file, const std::string& replaced, SafetensorsWriter& writer) {
  for (const SafetensorsTensor& tensor : file.tensors()) {
    if (tensor.name == replaced) continue;
    for (std::size_t begin = 0; begin < tensor.data.size(); begin += kPieceBytes) {
      const auto piece = tensor.data.subspan(begin, std::min<std::size_t>(kPieceBytes, tensor.data.size() - begin));
      writer.write(piece);
      file.release(piece);
    }
  }
}

// Shape [num_pages, page, width] of the tensor `kv`, or of [num_pages, page, 1, width].
std::array<std::int64_t, 3> kv_shape(const SafetensorsFile& file, const SafetensorsTensor& kv, int width) {
  std::vector<std::int64_t> shape = kv.shape;
  if (shape.size() == 4 && shape[2] == 1) shape.erase(shape.begin() + 2);
  if (kv.dtype != Dtype::kBF16 || shape.size() != 3 || shape[2] != width) {
    fail_input("{}: kv is {}; must be BF16 [num_pages, page, {}]{}", file.path(), describe(kv), width,
               kv.dtype == Dtype::kBF16 ? "" : ": convert it, in PyTorch with .bfloat16()");
  }
  if (shape[1] < 1 || shape[1] > std::numeric_limits<std::int32_t>::max()) {
    fail_input("{}: kv is {}; a page must hold 1 token or more", file.path(), describe(kv));
  }
  return {shape[0], shape[1], shape[2]};
}

std::vector<std::string> names_of_quantized_formats() {
  std::vector<std::string> names;
  for (const KvFormat format : kAllFormats) {
    if (traits_of(format).is_quantized()) names.emplace_back(format_name(format));
  }
  return names;
}

KvFormat format_of_name(const std::string& name) {
  for (const KvFormat format : kAllFormats) {
    if (name == format_name(format)) return format;
  }
  fail_input("--format is '{}'; allowed are {}", name, fmt::join(names_of_quantized_formats(), ", "));
}

struct QuantizeJob {
  const SafetensorsFile& file;
  const SafetensorsTensor& kv;
  chiasma_kv_format format;
  chiasma_scale_mode scale;
  double kv_scale;
  std::int64_t num_pages, page, width, page_bytes;

  std::int64_t kv_page_bytes() const { return page * width * 2; }

  // Returns the number of NaN and infinite inputs.
  std::int64_t quantize_pages(std::int64_t first, std::int64_t count, Piece& source, Piece& cache) const {
    const std::span<const std::byte> pages = pages_of(kv.data, first, count, kv_page_bytes());
    source.load(pages);
    file.release(pages);
    // Padding bytes between pages are not the quantiser's to write.
    std::ranges::fill(cache.first(count * page_bytes), std::byte{0});
    std::int64_t nonfinite = 0;
    const std::array<std::int64_t, 2> source_shape{count * page, width};
    const std::array<std::int64_t, 3> cache_shape{count, page, token_extent(static_cast<KvFormat>(format))};
    const std::array<std::int64_t, 1> one{1};
    chiasma_quantize_args args{};
    args.format = format;
    args.scale = scale;
    args.kv_scale = kv_scale;
    args.kv = chiasma_contiguous(source.data(), CHIASMA_BFLOAT16, kCpu, 2, source_shape.data());
    args.kv_cache = chiasma_contiguous(cache.data(), CHIASMA_UINT8, kCpu, 3, cache_shape.data());
    args.kv_cache.stride[0] = page_bytes;
    args.nonfinite_count = chiasma_contiguous(&nonfinite, CHIASMA_INT64, kCpu, 1, one.data());
    check_status(chiasma_quantize(&args, nullptr), file.path());
    return nonfinite;
  }
};

void run_quantize(const Options& options) {
  const SafetensorsFile file = SafetensorsFile::open(options.input);
  const SafetensorsTensor* kv = file.find("kv");
  if (kv == nullptr) fail_input("{}: there is no tensor kv", file.path());
  const KvFormat format = format_of_name(options.format);
  const bool has_cache_scale = traits_of(format).scale_type == ScaleType::cache;
  if (has_cache_scale != options.kv_scale.has_value()) {
    fail_input("--kv-scale is {}, but format {} has {}", has_cache_scale ? "missing" : "given", options.format,
               has_cache_scale ? "one scale for the whole cache" : "scales of its own");
  }
  const auto [num_pages, page, width] = kv_shape(file, *kv, key_dim(format));
  const auto c_format = static_cast<chiasma_kv_format>(format);
  const QuantizeJob job{.file = file,
                        .kv = *kv,
                        .format = c_format,
                        .scale = options.scale == "amax" ? CHIASMA_SCALE_AMAX : CHIASMA_SCALE_POW2,
                        .kv_scale = options.kv_scale.value_or(0),
                        .num_pages = num_pages,
                        .page = page,
                        .width = width,
                        .page_bytes = chiasma_kv_page_bytes(c_format, page)};

  SafetensorsMetadata metadata = file.metadata();
  metadata["format"] = options.format;
  SafetensorsWriter writer;
  metadata.erase("kv_scale");
  if (has_cache_scale) metadata["kv_scale"] = fmt::format("{}", *options.kv_scale);
  if (traits_of(format).has_scale_plane()) {
    metadata["page"] = fmt::format("{}", page);
    writer.declare("kv_cache", Dtype::kU8, {num_pages, job.page_bytes});
  } else {
    metadata.erase("page");
    writer.declare("kv_cache", Dtype::kU8, {num_pages, page, token_extent(format)});
  }
  writer.set_metadata(std::move(metadata));
  declare_others(file, "kv", "kv_cache", writer);
  if (file.find("slot_mapping") != nullptr) {
    fmt::print(stderr,
               "chiasma: note: {}: slot_mapping is copied, but not used: every row goes to the slot of its number\n",
               file.path());
  }
  writer.begin(options.output);

  std::int64_t nonfinite = 0;
  const std::int64_t piece_pages = std::min(num_pages, std::max<std::int64_t>(1, kPieceBytes / job.kv_page_bytes()));
  Piece source(piece_pages * job.kv_page_bytes());
  Piece cache(piece_pages * job.page_bytes);
  for_each_piece("quantizing", num_pages, job.kv_page_bytes(), [&](std::int64_t first, std::int64_t count) {
    nonfinite += job.quantize_pages(first, count, source, cache);
    writer.write(cache.first(count * job.page_bytes));
  });
  write_others(file, "kv", writer);
  file.check_length();
  writer.commit();
  fmt::print(stderr, "chiasma: {} pages of {} tokens quantised to {}, {} scales; {} values were NaN or infinite\n",
             num_pages, page, options.format, options.scale, nonfinite);
}

void run_dequantize(const Options& options) {
  const SafetensorsFile file = SafetensorsFile::open(options.input);
  const CacheTensor cache = read_cache(file, "kv_cache", "page");
  const auto format = static_cast<KvFormat>(cache.format);
  if (!traits_of(format).is_quantized()) {
    fail_input("{}: kv_cache is BF16; there is nothing to dequantise", file.path());
  }
  const double kv_scale = read_kv_scale(file, cache.format);
  const chiasma_tensor& whole = cache.tensor;
  if (whole.shape[1] < 1)
    fail_input("{}: kv_cache has pages of {} tokens; must be 1 or more", file.path(), whole.shape[1]);
  const std::int64_t num_pages = whole.shape[0];
  const std::int64_t page = whole.shape[1];
  const std::int64_t width = key_dim(format);
  const std::int64_t page_bytes = whole.stride[0];
  const std::int64_t kv_page_bytes = page * width * static_cast<std::int64_t>(sizeof(float));

  SafetensorsMetadata metadata = file.metadata();
  for (const char* key : {"format", "page", "kv_scale"}) metadata.erase(key);
  SafetensorsWriter writer;
  writer.set_metadata(std::move(metadata));
  writer.declare("kv", Dtype::kF32, {num_pages, page, width});
  declare_others(file, "kv_cache", "kv", writer);
  writer.begin(options.output);

  const std::int64_t piece_pages = std::min(num_pages, std::max<std::int64_t>(1, kPieceBytes / kv_page_bytes));
  Piece source(piece_pages * page_bytes);
  Piece kv(piece_pages * kv_page_bytes);
  for_each_piece("dequantizing", num_pages, kv_page_bytes, [&](std::int64_t first, std::int64_t count) {
    const std::span<const std::byte> pages = pages_of(cache.bytes, first, count, page_bytes);
    source.load(pages);
    file.release(pages);
    chiasma_dequantize_args args{};
    args.format = cache.format;
    args.kv_scale = kv_scale;
    args.kv_cache = whole;
    args.kv_cache.data = source.data();
    args.kv_cache.shape[0] = count;
    const std::array<std::int64_t, 3> shape{count, page, width};
    args.kv = chiasma_contiguous(kv.data(), CHIASMA_FLOAT32, kCpu, 3, shape.data());
    check_status(chiasma_dequantize(&args, nullptr), file.path());
    writer.write(kv.first(count * kv_page_bytes));
  });
  write_others(file, "kv_cache", writer);
  file.check_length();
  writer.commit();
}

CLI::App* add_command(CLI::App& app, const char* name, const char* description, Options& options) {
  CLI::App* command = app.add_subcommand(name, description);
  command->add_option("--input", options.input, "safetensors file to read")->required();
  command->add_option("--output", options.output, "safetensors file to write; replaced only when complete")->required();
  return command;
}

constexpr const char* kQuantizeHelp = R"(Quantises a KV cache.

Reads the tensor kv, BF16 [num_pages, page, 576] (512 for v4, v41 and the nope formats), RoPE part
last, and writes kv_cache, U8, with metadata "format":
  v32              [num_pages, page, 656]: 512 e4m3 codes, 4 float32 scales, 64 bf16 a token
  v32nope          the same without the 64 columns; the 128 bytes are there and not used
  v32nope_compact  [num_pages, page, 528]: the same without those bytes
  v4, v41plane     [num_pages, bytes per page], scales behind a page's rows, with metadata "page"
  v41              [num_pages, page, 528]: 512 e4m3 codes, 16 ue8m0 scales
  fp8, fp8nope     [num_pages, page, 576 or 512]: codes alone, with metadata "kv_scale"
Other tensors and metadata are copied, so that a file with q and indices can go straight into
`chiasma decode`. Scales: pow2 is the power of two at or above amax/448 (newer vLLM), amax is
amax/448 (SGLang, older vLLM; formats with float32 scales only).)";

constexpr const char* kDequantizeHelp = R"(Turns a quantised KV cache back into numbers.

Reads kv_cache as `chiasma decode` does and writes kv, F32 [num_pages, page, 576 or 512].
Other tensors and metadata are copied, but for the metadata "format", "page" and "kv_scale".)";

}  // namespace

void register_quantize(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* quantize = add_command(app, "quantize", kQuantizeHelp, *options);
  quantize->add_option("--scale", options->scale, "how scales are chosen")
      ->check(CLI::IsMember({"pow2", "amax"}))
      ->capture_default_str();
  quantize->add_option("--format", options->format, "format of the cache")
      ->check(CLI::IsMember(names_of_quantized_formats()))
      ->capture_default_str();
  quantize->add_option("--kv-scale", options->kv_scale, "fp8 and fp8nope: what every code is multiplied by");
  quantize->callback([options, &exit_code] {
    run_quantize(*options);
    exit_code = kExitOk;
  });
  CLI::App* dequantize = add_command(app, "dequantize", kDequantizeHelp, *options);
  dequantize->callback([options, &exit_code] {
    run_dequantize(*options);
    exit_code = kExitOk;
  });
}

}  // namespace chiasma::cli
