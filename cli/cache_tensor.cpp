#include "cli/cache_tensor.h"

#include <array>
#include <optional>

#include "cli/error.h"
#include "cli/input_parts.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

// Other programs use the key too ("pt"): what is no cache format says nothing.
std::optional<KvFormat> format_in_metadata(const SafetensorsFile& file) {
  const std::string* text = find_metadata(file, "format");
  if (text == nullptr) return std::nullopt;
  for (const KvFormat format : kAllFormats) {
    if (*text == format_name(format)) return format;
  }
  return std::nullopt;
}

// Tokens of a page as metadata says; none where it says nothing. Throws CommandError for what is no number of tokens.
std::optional<std::int32_t> page_in_metadata(const SafetensorsFile& file, const std::string& page_key) {
  const std::string* text = find_metadata(file, page_key);
  if (text == nullptr) return std::nullopt;
  const std::optional<std::int32_t> page = parse_number<std::int32_t>(*text);
  if (page && *page >= 1) return page;
  fail_input("{}: metadata \"{}\" is \"{}\"; must be a number of tokens, 1 or more", file.path(), page_key,
             printable(*text));
}

// Whether the extents tell the format: by the width, or by that of whole pages.
bool is_told_by_shape(KvFormat format, const SafetensorsTensor& cache, std::optional<std::int32_t> page) {
  const RowTraits traits = traits_of(format);
  // Formats that share a width, and those that need a scale, must be named.
  if (traits.is_quantized() && format != KvFormat::v32 && format != KvFormat::v4) return false;
  const std::size_t rank = cache.shape.size();
  if (rank < 2) return false;
  const std::int64_t last = cache.shape.back();
  if (last == token_extent(format) && (rank > 2 || !traits.has_scale_plane())) return true;
  if (rank != 2 || !page || !traits.is_quantized()) return false;
  return last == min_page_bytes(format, *page) ||
         last == chiasma_kv_page_bytes(static_cast<chiasma_kv_format>(format), *page);
}

KvFormat format_of_cache(const SafetensorsFile& file, const SafetensorsTensor& cache, const std::string& page_key) {
  const bool is_bytes = cache.dtype == Dtype::kU8 || cache.dtype == Dtype::kI8 || cache.dtype == Dtype::kF8E4M3;
  if (!is_bytes && cache.dtype != Dtype::kBF16) {
    fail_input(
        "{}: {} is {}; a quantised cache must be U8, I8 or F8_E4M3 (`chiasma quantize` makes one), an unquantised one "
        "BF16, from PyTorch by .bfloat16()",
        file.path(), cache.name, describe(cache));
  }
  const std::optional<KvFormat> stated = format_in_metadata(file);
  if (stated && traits_of(*stated).is_quantized() != is_bytes) {
    fail_input("{}: {} is {}, but metadata \"format\" says {}", file.path(), cache.name, describe(cache),
               format_name(*stated));
  }
  if (stated) return *stated;
  const std::optional<std::int32_t> page = page_in_metadata(file, page_key);
  std::string described;
  for (const KvFormat format : kAllFormats) {
    if (traits_of(format).is_quantized() == is_bytes && is_told_by_shape(format, cache, page)) return format;
    described += fmt::format("{}{} {} wide", described.empty() ? "" : ", ", format_name(format), token_extent(format));
  }
  fail_input(
      "{}: {} is {}; must be [num_pages, page, width], [slots, width] or, with metadata \"{}\", [num_pages, bytes per "
      "page], and metadata \"format\" must name what is not told by the width. Formats: {}",
      file.path(), cache.name, describe(cache), page_key, described);
}

// A cache of two dimensions as [num_pages, page, width].
chiasma_tensor unfold_pages(const SafetensorsFile& file, const SafetensorsTensor& cache, KvFormat format,
                            const std::string& page_key) {
  const std::int64_t width = token_extent(format);
  const bool is_rows = cache.shape[1] == width;
  const std::optional<std::int32_t> stated = page_in_metadata(file, page_key);
  // Rows that stand alone need no pages; those with a plane of scales do.
  const std::optional<std::int32_t> page =
      is_rows && !traits_of(format).has_scale_plane() ? std::optional<std::int32_t>(1) : stated;
  if (!page) {
    fail_input("{}: {} is {}; metadata \"{}\" must say how many tokens a page has", file.path(), cache.name,
               describe(cache), page_key);
  }
  const bool is_bytes = traits_of(format).is_quantized();
  const std::int64_t rows_of_shape = is_rows && cache.shape[0] % *page == 0 ? *page : 1;
  const std::int64_t extent = cache.shape[1] * rows_of_shape;
  const std::int64_t least = min_page_bytes(format, *page) / (is_bytes ? 1 : 2);
  if (extent < least) {
    fail_input("{}: {} is {}; pages of {} tokens need at least {} {}", file.path(), cache.name, describe(cache), *page,
               least, is_bytes ? "bytes" : "numbers");
  }
  const std::array<std::int64_t, 3> shape{cache.shape[0] / rows_of_shape, *page, width};
  chiasma_tensor tensor =
      chiasma_contiguous(const_cast<std::byte*>(cache.data.data()), is_bytes ? CHIASMA_UINT8 : CHIASMA_BFLOAT16,
                         chiasma_device{CHIASMA_CPU, 0}, static_cast<std::int32_t>(shape.size()), shape.data());
  tensor.stride[0] = extent;
  return tensor;
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
  const KvFormat format = format_of_cache(file, cache, page_key);
  const chiasma_tensor tensor =
      cache.shape.size() == 2
          ? unfold_pages(file, cache, format, page_key)
          : cpu_tensor(file, cache, traits_of(format).is_quantized() ? CHIASMA_UINT8 : CHIASMA_BFLOAT16);
  return {static_cast<chiasma_kv_format>(format), tensor, cache.data};
}

std::int64_t num_slots(const chiasma_tensor& cache) {
  std::int64_t slots = 0;
  // Only caches without bytes can be that large; the library refuses them.
  return __builtin_mul_overflow(cache.shape[0], cache.shape[1], &slots) ? 0 : slots;
}

}  // namespace chiasma::cli
