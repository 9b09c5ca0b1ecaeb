#include "cli/decode_input.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "cli/error.h"
#include "cli/near_miss.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

// Of the widest elements that are not converted, int32 and float32.
constexpr std::size_t kElementAlignment = 4;

constexpr chiasma_device kCpu{CHIASMA_CPU, 0};
constexpr const char* kCacheName = "kv_cache";
constexpr const char* kExtraCacheName = "extra_kv_cache";

constexpr const char* kScaleName = "sm_scale";

constexpr std::array<std::string_view, 10> kNames = {
    "q",         "q_rope",        kCacheName,      "indices",           "topk_length",
    "attn_sink", kExtraCacheName, "extra_indices", "extra_topk_length", kScaleName};

const SafetensorsTensor& require(const SafetensorsFile& file, const std::string& name) {
  if (const SafetensorsTensor* tensor = file.find(name)) return *tensor;
  std::string present;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    present += (present.empty() ? "" : ", ") + printable(tensor.name);
  }
  fail_input("{}: there is no tensor {}; the file has: {}", file.path(), name, present.empty() ? "none" : present);
}

const std::string* find_metadata(const SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? nullptr : &found->second;
}

template <typename Number>
std::optional<Number> parse_number(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

chiasma_tensor cpu_tensor(const SafetensorsFile& file, const SafetensorsTensor& tensor, chiasma_dtype dtype) {
  if (tensor.shape.size() > CHIASMA_MAX_RANK) {
    fail_input("{}: {} is {}; no argument has more than {} dimensions", file.path(), tensor.name, describe(tensor),
               CHIASMA_MAX_RANK);
  }
  // A scalar would read as "absent"; no argument is one.
  if (tensor.shape.empty()) fail_input("{}: {} is {}, a scalar", file.path(), tensor.name, describe(tensor));
  return chiasma_contiguous(const_cast<std::byte*>(tensor.data.data()), dtype, kCpu,
                            static_cast<std::int32_t>(tensor.shape.size()), tensor.shape.data());
}

// Other programs use the key too ("pt"): what is no cache format says nothing.
std::optional<KvFormat> format_in_metadata(const SafetensorsFile& file) {
  const std::string* text = find_metadata(file, "format");
  if (text == nullptr) return std::nullopt;
  for (const KvFormat format : kAllFormats) {
    if (*text == format_name(format)) return format;
  }
  return std::nullopt;
}

KvFormat format_of_cache(const SafetensorsFile& file, const SafetensorsTensor& cache) {
  const bool is_bytes = cache.dtype == Dtype::kU8 || cache.dtype == Dtype::kF8E4M3;
  if (!is_bytes && cache.dtype != Dtype::kBF16) {
    fail_input("{}: {} is {}; a quantised cache must be U8 or F8_E4M3, an unquantised one BF16", file.path(),
               cache.name, describe(cache));
  }
  const std::optional<KvFormat> stated = format_in_metadata(file);
  if (stated && traits_of(*stated).is_quantized() != is_bytes) {
    fail_input("{}: {} is {}, but metadata \"format\" says {}", file.path(), cache.name, describe(cache),
               format_name(*stated));
  }
  if (stated) return *stated;
  const std::int64_t last = cache.shape.empty() ? 0 : cache.shape.back();
  std::optional<KvFormat> found;
  std::string described;
  for (const KvFormat format : kAllFormats) {
    const RowTraits traits = traits_of(format);
    described += fmt::format("{}{} {} wide", described.empty() ? "" : ", ", traits.name, token_extent(format));
    // Formats that share a width, and those that need a scale, must be named.
    const bool is_told_by_width = format == KvFormat::v32 || format == KvFormat::v4 || !traits.is_quantized();
    if (cache.shape.size() > 2 && is_told_by_width && traits.is_quantized() == is_bytes &&
        last == token_extent(format)) {
      found = format;
    }
  }
  if (found) return *found;
  fail_input(
      "{}: {} is {}; must be [num_pages, page, width] or, where a format has a scale plane, [num_pages, bytes per "
      "page], "
      "and metadata \"format\" must name what is not told by the width. Formats: {}",
      file.path(), cache.name, describe(cache), described);
}

// [num_pages, bytes per page] as [num_pages, page, width] with that page stride.
chiasma_tensor unfold_pages(const SafetensorsFile& file, const SafetensorsTensor& cache, KvFormat format,
                            const std::string& page_key) {
  const std::string* text = find_metadata(file, page_key);
  if (text == nullptr) {
    fail_input("{}: {} is {}; metadata \"{}\" must say how many tokens a page has", file.path(), cache.name,
               describe(cache), page_key);
  }
  const std::optional<std::int32_t> page = parse_number<std::int32_t>(*text);
  if (!page || *page < 1) {
    fail_input("{}: metadata \"{}\" is \"{}\"; must be a number of tokens, 1 or more", file.path(), page_key,
               printable(*text));
  }
  const std::int64_t page_bytes = cache.shape[1];
  if (page_bytes < min_page_bytes(format, *page)) {
    fail_input("{}: {} is {}; pages of {} tokens need at least {} bytes", file.path(), cache.name, describe(cache),
               *page, min_page_bytes(format, *page));
  }
  const std::array<std::int64_t, 3> shape{cache.shape[0], *page, token_extent(format)};
  chiasma_tensor tensor = chiasma_contiguous(const_cast<std::byte*>(cache.data.data()), CHIASMA_UINT8, kCpu,
                                             static_cast<std::int32_t>(shape.size()), shape.data());
  tensor.stride[0] = page_bytes;
  return tensor;
}

std::int64_t num_slots(const chiasma_tensor& cache) {
  std::int64_t slots = 0;
  // Only caches without bytes can be that large; the library refuses them.
  return __builtin_mul_overflow(cache.shape[0], cache.shape[1], &slots) ? 0 : slots;
}

// Blanks around it and a plus are how people write numbers.
std::optional<double> parse_loosely(std::string_view text) {
  constexpr const char* kBlanks = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  return parse_number<double>(std::string(text));
}

double number_of(const SafetensorsFile& file, const SafetensorsTensor& tensor) {
  if (tensor.dtype == Dtype::kF32 && tensor.data.size() == sizeof(float)) {
    float value = 0;
    std::memcpy(&value, tensor.data.data(), sizeof value);
    return value;
  }
  if (tensor.dtype == Dtype::kF64 && tensor.data.size() == sizeof(double)) {
    double value = 0;
    std::memcpy(&value, tensor.data.data(), sizeof value);
    return value;
  }
  fail_input("{}: {} is {}; must be one number, F32 or F64", file.path(), tensor.name, describe(tensor));
}

}  // namespace

double read_kv_scale(const SafetensorsFile& file, chiasma_kv_format format) {
  const std::string* text = find_metadata(file, "kv_scale");
  if (traits_of(static_cast<KvFormat>(format)).scale_type != ScaleType::cache) return 0;
  if (text == nullptr) {
    fail_input("{}: metadata \"kv_scale\" must say what the codes of an {} cache are multiplied by", file.path(),
               chiasma_kv_format_name(format));
  }
  const std::optional<double> value = parse_number<double>(*text);
  if (!value) fail_input("{}: metadata \"kv_scale\" is \"{}\"; must be a number", file.path(), printable(*text));
  return *value;
}

CacheTensor read_cache(const SafetensorsFile& file, const std::string& name, const std::string& page_key) {
  const SafetensorsTensor& cache = require(file, name);
  const KvFormat format = format_of_cache(file, cache);
  const chiasma_tensor tensor =
      traits_of(format).is_quantized() && cache.shape.size() == 2
          ? unfold_pages(file, cache, format, page_key)
          : cpu_tensor(file, cache, traits_of(format).is_quantized() ? CHIASMA_UINT8 : CHIASMA_BFLOAT16);
  return {static_cast<chiasma_kv_format>(format), tensor, cache.data};
}

DecodeInput::DecodeInput(const SafetensorsFile& file, std::optional<double> sm_scale) : file_(file) {
  const CacheTensor cache = read_cache(file, kCacheName, "page");
  args_.format = cache.format;
  args_.sm_scale = choose_sm_scale(sm_scale);
  args_.kv_scale = read_kv_scale(file, cache.format);
  require(file, "q");
  require(file, "indices");
  add(&chiasma_decode_args::kv_cache, cache.tensor, cache.bytes);
  add_plain("q", Dtype::kBF16, &chiasma_decode_args::q);
  add_plain("q_rope", Dtype::kBF16, &chiasma_decode_args::q_rope);
  add_integers("indices", &chiasma_decode_args::indices, num_slots(cache.tensor));
  add_integers("topk_length", &chiasma_decode_args::topk_length, 0);
  add_plain("attn_sink", Dtype::kF32, &chiasma_decode_args::attn_sink);
  std::int64_t extra_slots = 0;
  if (file.find(kExtraCacheName) != nullptr) {
    const CacheTensor extra = read_cache(file, kExtraCacheName, "extra_page");
    if (extra.format != cache.format) {
      fail_input("{}: {} is a {} cache, but {} is {}", file.path(), kExtraCacheName,
                 format_name(static_cast<KvFormat>(extra.format)), kCacheName,
                 format_name(static_cast<KvFormat>(cache.format)));
    }
    extra_slots = num_slots(extra.tensor);
    add(&chiasma_decode_args::extra_kv_cache, extra.tensor, extra.bytes);
  }
  add_integers("extra_indices", &chiasma_decode_args::extra_indices, extra_slots);
  add_integers("extra_topk_length", &chiasma_decode_args::extra_topk_length, 0);
  find_unused();
}

void DecodeInput::add(chiasma_tensor chiasma_decode_args::*member, chiasma_tensor tensor,
                      std::span<const std::byte> bytes) {
  // Caches are used where they lie, however large; the other tensors are small and need their elements aligned.
  const bool is_cache = member == &chiasma_decode_args::kv_cache || member == &chiasma_decode_args::extra_kv_cache;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % kElementAlignment == 0;
  if (!is_cache && !is_aligned && !bytes.empty()) {
    copies_.emplace_back((bytes.size() + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    std::memcpy(copies_.back().data(), bytes.data(), bytes.size());
    tensor.data = copies_.back().data();
  }
  args_.*member = tensor;
  tensors_.push_back({member, bytes.size()});
}

void DecodeInput::add_plain(const std::string& name, Dtype dtype, chiasma_tensor chiasma_decode_args::*member) {
  const SafetensorsTensor* tensor = file_.find(name);
  if (tensor == nullptr) return;
  if (tensor->dtype != dtype) {
    fail_input("{}: {} is {}; must be {}", file_.path(), name, describe(*tensor), dtype_name(dtype));
  }
  add(member, cpu_tensor(file_, *tensor, dtype == Dtype::kBF16 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32), tensor->data);
}

// int64 becomes int32. num_slots: indices from there on select nothing, so that any of them may become -1; 0 for
// lengths, which count only up to topk.
void DecodeInput::add_integers(const std::string& name, chiasma_tensor chiasma_decode_args::*member,
                               std::int64_t num_slots) {
  const SafetensorsTensor* tensor = file_.find(name);
  if (tensor == nullptr) return;
  if (tensor->dtype == Dtype::kI32) return add(member, cpu_tensor(file_, *tensor, CHIASMA_INT32), tensor->data);
  if (tensor->dtype != Dtype::kI64) {
    fail_input("{}: {} is {}; must be I32 or I64", file_.path(), name, describe(*tensor));
  }
  const bool is_length =
      member == &chiasma_decode_args::topk_length || member == &chiasma_decode_args::extra_topk_length;
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  const std::size_t count = tensor->data.size() / sizeof(std::int64_t);
  copies_.emplace_back((count * sizeof(std::int32_t) + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  auto* converted = reinterpret_cast<std::int32_t*>(copies_.back().data());
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t value = 0;
    std::memcpy(&value, tensor->data.data() + i * sizeof value, sizeof value);
    if (value > kMax && value < num_slots) {
      fail_input("{}: {} has the slot {}; slots beyond {} cannot be addressed", file_.path(), name, value, kMax);
    }
    if (is_length) value = std::clamp<std::int64_t>(value, 0, kMax);
    converted[i] = value < 0 || value > kMax ? -1 : static_cast<std::int32_t>(value);
  }
  chiasma_tensor shape = cpu_tensor(file_, *tensor, CHIASMA_INT32);
  shape.data = converted;
  args_.*member = shape;
  tensors_.push_back({member, count * sizeof(std::int32_t)});
}

double DecodeInput::choose_sm_scale(std::optional<double> given) {
  if (given) return *given;
  if (const SafetensorsTensor* tensor = file_.find(kScaleName)) return number_of(file_, *tensor);
  if (const std::string* text = find_metadata(file_, kScaleName)) {
    const std::optional<double> value = parse_loosely(*text);
    if (!value) {
      fail_input("{}: metadata \"{}\" is \"{}\"; must be a number", file_.path(), kScaleName, printable(*text));
    }
    return *value;
  }
  constexpr std::array<std::string_view, 1> kScaleNames = {kScaleName};
  for (const auto& [key, value] : file_.metadata()) {
    if (meant_by(key, kScaleNames).empty()) continue;
    fail_input("{}: metadata \"{}\" is not read; did you mean \"{}\"? Rename it, or give --sm-scale", file_.path(),
               printable(key), kScaleName);
  }
  const double scale = chiasma_default_sm_scale(args_.format);
  notes_.push_back(
      fmt::format("{} has no {}; taken is d_qk^-1/2 = {:.6g}, which is no model's exactly: give metadata \"{}\" or "
                  "--sm-scale",
                  file_.path(), kScaleName, scale, kScaleName));
  return scale;
}

void DecodeInput::find_unused() {
  for (const SafetensorsTensor& tensor : file_.tensors()) {
    if (std::ranges::find(kNames, tensor.name) != kNames.end()) continue;
    const std::string meant = meant_by(tensor.name, kNames);
    notes_.push_back(fmt::format("{}: decode does not use the tensor {}{}", file_.path(), printable(tensor.name),
                                 meant.empty() ? "" : fmt::format("; did you mean {}?", meant)));
  }
}

}  // namespace chiasma::cli
