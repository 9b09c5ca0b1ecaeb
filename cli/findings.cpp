#include "cli/findings.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cli/error.h"
#include "cli/input_parts.h"
#include "format/kv_format.h"
#include "format/numbers.h"

namespace chiasma::cli {
namespace {

// Stretches that a large tensor is looked at in, and units in each.
constexpr std::int64_t kStretches = 64;

// Calls work(first, count) for stretches of [0, total) that are at most `longest` units each if not all are wanted.
template <typename Work>
void for_stretches(std::int64_t total, std::int64_t longest, bool all, const Work& work) {
  const std::int64_t stretches = std::max<std::int64_t>(1, all ? (total + longest - 1) / longest : kStretches);
  const std::int64_t step = (total + stretches - 1) / stretches;
  for (std::int64_t first = 0; first < total; first += step) {
    work(first, std::min({longest, step, total - first}));
  }
}

template <typename T>
T load(const std::byte* from) {
  T value{};
  std::memcpy(&value, from, sizeof value);
  return value;
}

double load_number(Dtype dtype, const std::byte* from) {
  switch (dtype) {
    case Dtype::kF32: return static_cast<double>(load<float>(from));
    case Dtype::kF64: return load<double>(from);
    case Dtype::kF16: return static_cast<double>(half_to_float(load<std::uint16_t>(from)));
    case Dtype::kBF16: return static_cast<double>(to_float(load<bf16_t>(from)));
    case Dtype::kI32: return load<std::int32_t>(from);
    default: return static_cast<double>(load<std::int64_t>(from));
  }
}

void look_at_scale(ScaleType type, const std::byte* scale, CacheFindings& findings) {
  const float value =
      type == ScaleType::ue8m0 ? ue8m0_to_float(std::to_integer<std::uint8_t>(*scale)) : load<float>(scale);
  ++findings.scales;
  if (!std::isfinite(value) || value < 0) {
    ++findings.bad_scales;
    return;
  }
  int exponent = 0;
  if (value == 0) ++findings.zero_scales;
  if (std::frexp(value, &exponent) == 0.5f) ++findings.powers_of_two;
  findings.scale_range.add(static_cast<double>(value));
}

void look_at_slot(KvFormat format, const CacheTensor& cache, std::int64_t slot, CacheFindings& findings) {
  const RowTraits traits = traits_of(format);
  const std::int64_t page_size = cache.tensor.shape[1];
  const std::int64_t page_stride = cache.tensor.stride[0] * (traits.is_quantized() ? 1 : 2);
  const std::byte* page = cache.bytes.data() + slot / page_size * page_stride;
  const std::byte* row = page + slot % page_size * traits.row_bytes;
  for (int i = 0; i < traits.code_columns; ++i) {
    findings.nan_codes += (std::to_integer<int>(row[i]) & 0x7f) == 0x7f ? 1 : 0;
  }
  for (int i = 0; i < traits.bf16_columns; ++i) {
    const float value = to_float(load<bf16_t>(row + traits.bf16_offset + 2 * i));
    findings.nonfinite_bf16 += std::isfinite(value) ? 0 : 1;
  }
  if (traits.scale_type != ScaleType::float32 && traits.scale_type != ScaleType::ue8m0) return;
  const std::byte* scales =
      (traits.has_scale_plane() ? page + plane_offset(format, page_size, slot % page_size) : row) +
      traits.scales_offset;
  const int scale_bytes = traits.scale_type == ScaleType::ue8m0 ? 1 : 4;
  for (int i = 0; i < traits.num_scales(); ++i) look_at_scale(traits.scale_type, scales + i * scale_bytes, findings);
}

// read_cache() leaves most shapes to the library, which is not asked here.
void check_rows(const SafetensorsFile& file, const CacheTensor& cache) {
  const chiasma_tensor& tensor = cache.tensor;
  const auto format = static_cast<KvFormat>(cache.format);
  const bool has_rows = tensor.rank == 3 || (tensor.rank == 4 && tensor.shape[2] == 1);
  if (has_rows && tensor.shape[tensor.rank - 1] == token_extent(format)) return;
  fail_input("{}: a {} cache must be [num_pages, page, {}]", file.path(), format_name(format), token_extent(format));
}

}  // namespace

bool has_numbers(Dtype dtype) {
  return dtype == Dtype::kF32 || dtype == Dtype::kF64 || dtype == Dtype::kF16 || dtype == Dtype::kBF16 ||
         dtype == Dtype::kI32 || dtype == Dtype::kI64;
}

NumberFindings look_at_numbers(const SafetensorsFile& file, const SafetensorsTensor& tensor, bool all) {
  constexpr std::int64_t kLongest = 1 << 18;
  NumberFindings findings;
  const std::int64_t size = dtype_bits(tensor.dtype) / 8;
  for_stretches(std::ssize(tensor.data) / size, kLongest, all, [&](std::int64_t first, std::int64_t count) {
    const auto part =
        tensor.data.subspan(static_cast<std::size_t>(first * size), static_cast<std::size_t>(count * size));
    for (std::int64_t i = 0; i < count; ++i) {
      const double value = load_number(tensor.dtype, part.data() + i * size);
      findings.nan += std::isnan(value) ? 1 : 0;
      findings.infinite += std::isinf(value) ? 1 : 0;
      if (std::isfinite(value)) findings.range.add(value);
    }
    findings.looked_at += count;
    file.release(part);
  });
  return findings;
}

CacheFindings look_at_cache(const SafetensorsFile& file, const CacheTensor& cache, bool all) {
  constexpr std::int64_t kLongest = 1024;
  CacheFindings findings;
  check_rows(file, cache);
  findings.slots = num_slots(cache.tensor);
  if (cache.bytes.empty()) return findings;
  const auto bytes_per_slot = cache.bytes.size() / static_cast<std::size_t>(findings.slots);
  for_stretches(findings.slots, kLongest, all, [&](std::int64_t first, std::int64_t count) {
    for (std::int64_t slot = first; slot < first + count; ++slot) {
      look_at_slot(static_cast<KvFormat>(cache.format), cache, slot, findings);
    }
    findings.looked_at += count;
    file.release(cache.bytes.subspan(static_cast<std::size_t>(first) * bytes_per_slot,
                                     static_cast<std::size_t>(count) * bytes_per_slot));
  });
  return findings;
}

IndexFindings look_at_indices(const SafetensorsTensor& indices, std::int64_t num_slots) {
  IndexFindings findings;
  const std::int64_t size = dtype_bits(indices.dtype) / 8;
  findings.entries = std::ssize(indices.data) / size;
  const std::int64_t topk = indices.shape.empty() ? 1 : indices.shape.back();
  std::int64_t valid_in_row = 0;
  for (std::int64_t i = 0; i < findings.entries; ++i) {
    const auto value = indices.dtype == Dtype::kI32 ? load<std::int32_t>(indices.data.data() + i * size)
                                                    : load<std::int64_t>(indices.data.data() + i * size);
    const bool is_valid = value >= 0 && value < num_slots;
    findings.minus_one += value == -1 ? 1 : 0;
    findings.other_negative += value < -1 ? 1 : 0;
    findings.beyond += value >= num_slots ? 1 : 0;
    findings.valid += is_valid ? 1 : 0;
    valid_in_row += is_valid ? 1 : 0;
    if (is_valid) findings.range.add(static_cast<double>(value));
    if (i % topk != topk - 1) continue;
    ++findings.rows;
    findings.empty_rows += valid_in_row == 0 ? 1 : 0;
    valid_in_row = 0;
  }
  return findings;
}

}  // namespace chiasma::cli
