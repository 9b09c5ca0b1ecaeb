#include "api/validate_parts.h"

#include <cfloat>
#include <climits>
#include <string>
#include <utility>

namespace chiasma {
namespace {

// Collapses [num_pages, page, 1, x] to [num_pages, page, x].
chiasma_tensor without_head_dim(const chiasma_tensor& cache) {
  chiasma_tensor flat = cache;
  if (cache.rank == 4 && cache.shape[2] == 1) {
    flat.rank = 3;
    flat.shape[2] = cache.shape[3];
    flat.stride[2] = cache.stride[3];
  }
  return flat;
}

// The CPU's code reads a cache byte by byte or with unaligned loads; a GPU's copies go by 16 bytes.
int cache_alignment(chiasma_device device) {
  return device.kind == CHIASMA_CPU ? 1 : kCacheAlignment;
}

Status check_cache_data(NamedTensor argument, int alignment) {
  const Status status = check_data(argument, alignment);
  if (status.ok() || argument.tensor.data == nullptr) return status;
  return {status.code(),
          status.message() + "; a CUDA device reads caches by 16 bytes (on the CPU any address will do)"};
}

std::string names_of_formats() {
  std::string names;
  for (const KvFormat format : kAllFormats) {
    names += concat(names.empty() ? "" : ", ", format_name(format), " (", static_cast<int>(format), ")");
  }
  return names;
}

}  // namespace

bool is_known_format(chiasma_kv_format format) {
  for (const KvFormat known : kAllFormats) {
    if (static_cast<int>(known) == static_cast<int>(format)) return true;
  }
  return false;
}

bool is_absent(const chiasma_tensor& tensor) {
  return tensor.rank == 0;
}

Status require(NamedTensor argument) {
  if (!is_absent(argument.tensor)) return {};
  return invalid_argument(argument.name, " is absent (rank 0) but required");
}

Status check_format(chiasma_kv_format format) {
  if (is_known_format(format)) return {};
  return invalid_argument("format is ", static_cast<int>(format), "; allowed are ", names_of_formats());
}

Status check_kv_scale(double kv_scale, KvFormat format, float* scale) {
  *scale = 1.0f;
  if (kv_scale == 0) return {};
  if (traits_of(format).scale_type != ScaleType::cache) {
    if (kv_scale == 1) return {};
    return invalid_argument("kv_scale is ", kv_scale, "; format ", format_name(format),
                            " has no scale for the whole cache, so that it must be 0 or 1");
  }
  if (!(kv_scale >= FLT_MIN && kv_scale <= FLT_MAX)) {
    return invalid_argument("kv_scale is ", kv_scale, "; it must be a positive float32 number, or 0 for 1");
  }
  *scale = static_cast<float>(kv_scale);
  return {};
}

Status check_cache(const char* name, const chiasma_tensor& given, KvFormat format, DataCheck data, KvPool* pool) {
  const chiasma_tensor tensor = without_head_dim(given);
  const NamedTensor argument{name, tensor};
  const int width = token_extent(format);
  const std::string shape_names =
      concat("[num_pages, page, ", width, "] or [num_pages, page, 1, ", width, "] (", format_name(format), ")");
  CHIASMA_RETURN_IF_ERROR(check_tensor(argument, {traits_of(format).is_quantized() ? CHIASMA_UINT8 : CHIASMA_BFLOAT16},
                                       {kAnyExtent, kAnyExtent, width}, shape_names.c_str()));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(argument));
  const auto [num_pages, page] = std::pair(tensor.shape[0], tensor.shape[1]);
  if (page < 1 || page > INT_MAX) {
    return invalid_argument(name, " has a page size of ", page, "; allowed are 1 to ", INT_MAX);
  }
  const std::int64_t element_bytes = dtype_bytes(tensor.dtype);
  if (num_pages > 0 && page > 1 && tensor.stride[1] != token_extent(format)) {
    return invalid_argument(name, " has stride(1) = ", tensor.stride[1], "; the rows of a page must be packed, ",
                            token_extent(format), " apart");
  }
  const int alignment = cache_alignment(tensor.device);
  const std::int64_t min_bytes = min_page_bytes(format, static_cast<int>(page));
  std::int64_t page_stride_bytes = (min_bytes + kCacheAlignment - 1) / kCacheAlignment * kCacheAlignment;
  if (num_pages > 1) {
    page_stride_bytes = tensor.stride[0] * element_bytes;
    if (page_stride_bytes < min_bytes || page_stride_bytes % alignment != 0) {
      const std::string rule = alignment > 1 ? concat(" a multiple of ", alignment, " on a CUDA device and") : "";
      return invalid_argument(name, " has a page stride of ", page_stride_bytes, " bytes; it must be", rule,
                              " at least ", min_bytes, " (", page, " tokens)");
    }
  }
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_cache_data(argument, alignment));
  *pool = {data_as<const std::byte>(tensor), page_stride_bytes, num_pages, page, 1.0f};
  return {};
}

Status check_output(NamedTensor output, NamedTensor reference, DataCheck data) {
  CHIASMA_RETURN_IF_ERROR(check_same_device(output, reference));
  CHIASMA_RETURN_IF_ERROR(check_no_self_overlap(output));
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(output, dtype_bytes(output.tensor.dtype)));
  return {};
}

}  // namespace chiasma
