#include "api/tensor_check.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace chiasma {
namespace {

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

const char* dtype_name(chiasma_dtype dtype) {
  switch (dtype) {
    case CHIASMA_UINT8: return "uint8";
    case CHIASMA_INT32: return "int32";
    case CHIASMA_INT64: return "int64";
    case CHIASMA_BFLOAT16: return "bfloat16";
    case CHIASMA_FLOAT32: return "float32";
    case CHIASMA_FLOAT64: return "float64";
  }
  return "unknown";
}

bool is_known_device_kind(chiasma_device_kind kind) {
  return kind == CHIASMA_CPU || kind == CHIASMA_CUDA;
}

// Bytes from the first element to just past the last one; -1 if that overflows.
std::int64_t span_bytes(const chiasma_tensor& tensor) {
  if (is_empty(tensor)) return 0;
  std::int64_t last = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.shape[dim] == 1) continue;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(tensor.shape[dim] - 1, tensor.stride[dim], &reach)) return -1;
    if (__builtin_add_overflow(last, reach, &last)) return -1;
  }
  std::int64_t bytes = 0;
  if (__builtin_add_overflow(last, std::int64_t{1}, &last)) return -1;
  if (__builtin_mul_overflow(last, std::int64_t{dtype_bytes(tensor.dtype)}, &bytes)) return -1;
  return bytes;
}

// Product of the extents, or -1 if it overflows.
std::int64_t num_elements(const chiasma_tensor& tensor) {
  if (is_empty(tensor)) return 0;
  std::int64_t count = 1;
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (__builtin_mul_overflow(count, tensor.shape[dim], &count)) return -1;
  }
  return count > kMaxBytes / dtype_bytes(tensor.dtype) ? -1 : count;
}

bool is_packed(const chiasma_tensor& tensor) {
  return span_bytes(tensor) == num_elements(tensor) * dtype_bytes(tensor.dtype);
}

}  // namespace

int dtype_bytes(chiasma_dtype dtype) {
  switch (dtype) {
    case CHIASMA_UINT8: return 1;
    case CHIASMA_INT32: return 4;
    case CHIASMA_INT64: return 8;
    case CHIASMA_BFLOAT16: return 2;
    case CHIASMA_FLOAT32: return 4;
    case CHIASMA_FLOAT64: return 8;
  }
  return 1;
}

std::string shape_text(const chiasma_tensor& tensor) {
  std::string text = "[";
  for (int dim = 0; dim < std::min(tensor.rank, CHIASMA_MAX_RANK); ++dim) {
    text += concat(dim == 0 ? "" : ", ", tensor.shape[dim]);
  }
  return text + "]";
}

std::string device_text(chiasma_device device) {
  if (device.kind == CHIASMA_CPU) return device.index == 0 ? "cpu" : concat("cpu:", device.index);
  if (device.kind == CHIASMA_CUDA) return concat("cuda:", device.index);
  return concat("unknown device kind ", static_cast<int>(device.kind));
}

bool is_empty(const chiasma_tensor& tensor) {
  return std::any_of(tensor.shape, tensor.shape + tensor.rank, [](std::int64_t extent) { return extent == 0; });
}

Status check_tensor(NamedTensor argument, std::initializer_list<chiasma_dtype> dtypes,
                    std::initializer_list<std::int64_t> expected, const char* shape_names) {
  const auto& [name, tensor] = argument;
  if (tensor.rank != static_cast<std::int32_t>(expected.size())) {
    return invalid_argument(name, " has rank ", tensor.rank, "; it must be ", shape_names, ", rank ", expected.size());
  }
  if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) {
    std::string allowed;
    for (chiasma_dtype dtype : dtypes) allowed += concat(allowed.empty() ? "" : " or ", dtype_name(dtype));
    return invalid_argument(name, " has dtype ", dtype_name(tensor.dtype), " (", static_cast<int>(tensor.dtype),
                            "); it must be ", allowed);
  }
  if (!is_known_device_kind(tensor.device.kind) || tensor.device.index < 0) {
    return invalid_argument(name, " is on ", device_text(tensor.device), " index ", tensor.device.index,
                            "; allowed are cpu (1) and cuda (2) with an index >= 0");
  }
  for (int dim = 0; dim < tensor.rank; ++dim) {
    const std::int64_t want = expected.begin()[dim];
    if (tensor.shape[dim] < 0 || (want != kAnyExtent && tensor.shape[dim] != want)) {
      const std::string allowed = want == kAnyExtent ? std::string(">= 0") : concat(want);
      return invalid_argument(name, " has shape ", shape_text(tensor), "; extent ", dim, " of ", shape_names,
                              " must be ", allowed);
    }
    if (tensor.shape[dim] > 1 && tensor.stride[dim] < 0) {
      return invalid_argument(name, " has stride(", dim, ") = ", tensor.stride[dim], "; strides must be >= 0");
    }
  }
  if (num_elements(tensor) < 0 || span_bytes(tensor) < 0) {
    return invalid_argument(name, " with shape ", shape_text(tensor), " spans more bytes than 64 bits can count");
  }
  return {};
}

Status check_last_contiguous(NamedTensor argument) {
  const auto& [name, tensor] = argument;
  const int last = tensor.rank - 1;
  if (is_empty(tensor) || tensor.shape[last] == 1 || tensor.stride[last] == 1) return {};
  return invalid_argument(name, " has stride(", last, ") = ", tensor.stride[last],
                          "; its last dimension must be contiguous (stride 1)");
}

Status check_data(NamedTensor argument, std::int64_t alignment) {
  const auto& [name, tensor] = argument;
  if (is_empty(tensor)) return {};
  if (tensor.data == nullptr) {
    return invalid_argument(name, " has shape ", shape_text(tensor), " but its data pointer is NULL");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data);
  if (address % static_cast<std::uintptr_t>(alignment) != 0) {
    return invalid_argument(name, " starts at address ", tensor.data, ", which is not a multiple of ", alignment,
                            " bytes");
  }
  return {};
}

Status check_no_self_overlap(NamedTensor argument) {
  const auto& [name, tensor] = argument;
  if (is_empty(tensor)) return {};
  // (stride, extent) of each dimension; those that address nothing further sort last and add nothing.
  std::array<std::pair<std::int64_t, std::int64_t>, CHIASMA_MAX_RANK> dims;
  dims.fill({INT64_MAX, 1});
  for (int dim = 0; dim < tensor.rank; ++dim) {
    if (tensor.shape[dim] > 1) dims[static_cast<std::size_t>(dim)] = {tensor.stride[dim], tensor.shape[dim]};
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reach = 0;  // largest offset that the dimensions so far can address
  for (const auto& [stride, extent] : dims) {
    if (stride <= reach) {
      return invalid_argument(name, " with shape ", shape_text(tensor), " has a stride of ", stride,
                              ", which makes its elements overlap; an output needs memory of its own for each element");
    }
    reach += (extent - 1) * stride;
  }
  return {};
}

Status check_disjoint(NamedTensor output, NamedTensor input) {
  if (is_empty(output.tensor) || is_empty(input.tensor)) return {};
  const auto out_begin = reinterpret_cast<std::uintptr_t>(output.tensor.data);
  const auto in_begin = reinterpret_cast<std::uintptr_t>(input.tensor.data);
  const auto out_end = out_begin + static_cast<std::uintptr_t>(span_bytes(output.tensor));
  const auto in_end = in_begin + static_cast<std::uintptr_t>(span_bytes(input.tensor));
  const bool ranges_meet = out_begin < in_end && in_begin < out_end;
  if (out_begin == in_begin || (ranges_meet && is_packed(output.tensor) && is_packed(input.tensor))) {
    return invalid_argument(output.name, " at ", output.tensor.data, " overlaps ", input.name, " at ",
                            input.tensor.data, "; outputs need memory of their own");
  }
  return {};
}

Status check_same_device(NamedTensor argument, NamedTensor reference) {
  const chiasma_device a = argument.tensor.device;
  const chiasma_device b = reference.tensor.device;
  if (a.kind == b.kind && a.index == b.index) return {};
  return invalid_argument(argument.name, " is on ", device_text(a), " but ", reference.name, " is on ", device_text(b),
                          "; all tensors must live on one device");
}

}  // namespace chiasma
