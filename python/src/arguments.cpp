#include "arguments.h"

#include <tvm/ffi/extra/c_env_api.h>

#include <algorithm>

namespace chiasma::python {
namespace {

bool is_type(const DLDataType& dtype, int code, int bits) {
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

bool is_bfloat16(const DLDataType& dtype) {
  return is_type(dtype, kDLBfloat, 16) || is_type(dtype, kDLUInt, 16);
}

bool is_bytes(const DLDataType& dtype) {
  return is_type(dtype, kDLUInt, 8) || is_type(dtype, kDLInt, 8) || is_type(dtype, kDLFloat8_e4m3fn, 8);
}

std::string dtype_text(const DLDataType& dtype) {
  TVMFFIAny text;
  if (TVMFFIDataTypeToString(&dtype, &text) != 0) return "unknown";
  // Takes the reference over.
  const tvm::ffi::Any owned = tvm::ffi::details::AnyUnsafe::MoveTVMFFIAnyToAny(&text);
  return owned.cast<std::string>();
}

std::string allowed_text(unsigned accepts) {
  std::string text;
  const auto add = [&](unsigned flag, const char* name) {
    if ((accepts & flag) != 0) text += std::string(text.empty() ? "" : " or ") + name;
  };
  add(kBfloat16, "bfloat16");
  add(kFloat32, "float32");
  add(kInt32, "int32");
  add(kInt64, "int64");
  add(kBytes, "uint8, int8 or float8_e4m3fn");
  return text;
}

// What to do about a dtype, where there is an obvious thing.
std::string remedy(const std::string& name, const DLDataType& dtype, unsigned accepts) {
  const bool is_float = dtype.code == kDLFloat;
  if (accepts == kBfloat16 && is_float) {
    return ". Convert it: " + name + ".bfloat16(), or " + name + ".to(torch.bfloat16)";
  }
  if (accepts == kFloat32 && (is_float || dtype.code == kDLBfloat)) {
    return ". Convert it: " + name + ".float(), or " + name + ".to(torch.float32)";
  }
  return "";
}

chiasma_dtype convert_dtype(Argument argument, const DLDataType& dtype, unsigned accepts) {
  if ((accepts & kBfloat16) != 0 && is_bfloat16(dtype)) return CHIASMA_BFLOAT16;
  if ((accepts & kBytes) != 0 && is_bytes(dtype)) return CHIASMA_UINT8;
  if ((accepts & kInt32) != 0 && is_type(dtype, kDLInt, 32)) return CHIASMA_INT32;
  if ((accepts & kInt64) != 0 && is_type(dtype, kDLInt, 64)) return CHIASMA_INT64;
  if ((accepts & kFloat32) != 0 && is_type(dtype, kDLFloat, 32)) return CHIASMA_FLOAT32;
  fail(FailureKind::type, argument.name, " has dtype ", dtype_text(dtype), "; it must be ", allowed_text(accepts),
       remedy(argument.name, dtype, accepts));
}

chiasma_device convert_device(Argument argument, const DLDevice& device) {
  switch (static_cast<int>(device.device_type)) {
    case kDLCPU:
    case kDLCUDAHost: return {CHIASMA_CPU, 0};
    case kDLCUDA:
    case kDLCUDAManaged: return {CHIASMA_CUDA, device.device_id};
    default:
      fail(FailureKind::value, argument.name, " is on a device of DLPack kind ", static_cast<int>(device.device_type),
           "; allowed are cpu and cuda");
  }
}

}  // namespace

bool is_none(Argument argument) {
  return argument.value->type_index == kTVMFFINone;
}

const DLTensor* as_dltensor(Argument argument) {
  switch (argument.value->type_index) {
    case kTVMFFITensor: return TVMFFITensorGetDLTensorPtr(argument.value->v_obj);
    case kTVMFFIDLTensorPtr: return static_cast<const DLTensor*>(argument.value->v_ptr);
    default: throw Failure{FailureKind::not_a_tensor, argument.name};
  }
}

std::string shape_text(const DLTensor& tensor) {
  std::string text = "[";
  for (int dim = 0; dim < tensor.ndim; ++dim) text += (dim == 0 ? "" : ", ") + std::to_string(tensor.shape[dim]);
  return text + "]";
}

chiasma_tensor as_tensor(Argument argument, unsigned accepts, int unit_dim) {
  chiasma_tensor tensor{};
  if (is_none(argument)) return tensor;
  const DLTensor& given = *as_dltensor(argument);
  tensor.dtype = convert_dtype(argument, given.dtype, accepts);
  tensor.device = convert_device(argument, given.device);
  const int units = unit_dim >= 0 ? 1 : 0;
  // Rank 0 means "absent" to the library.
  if (given.ndim < 1 || given.ndim < unit_dim || given.ndim + units > CHIASMA_MAX_RANK) {
    fail(FailureKind::value, argument.name, " has shape ", shape_text(given), ", rank ", given.ndim,
         ", which no call takes");
  }
  tensor.rank = given.ndim + units;
  std::int64_t packed_stride = 1;
  for (int from = given.ndim - 1; from >= 0; --from) {
    const int to = units == 1 && from >= unit_dim ? from + 1 : from;
    tensor.shape[to] = given.shape[from];
    tensor.stride[to] = given.strides != nullptr ? given.strides[from] : packed_stride;
    packed_stride *= std::max<std::int64_t>(given.shape[from], 1);
  }
  if (units == 1) tensor.shape[unit_dim] = 1;
  if (given.data != nullptr) tensor.data = static_cast<std::byte*>(given.data) + given.byte_offset;
  return tensor;
}

std::int64_t as_int(Argument argument) {
  if (argument.value->type_index == kTVMFFIInt || argument.value->type_index == kTVMFFIBool) {
    return argument.value->v_int64;
  }
  fail(FailureKind::type, argument.name, " must be an int that fits into 64 bits");
}

double as_double(Argument argument) {
  if (argument.value->type_index == kTVMFFIFloat) return argument.value->v_float64;
  if (argument.value->type_index == kTVMFFIInt) return static_cast<double>(argument.value->v_int64);
  fail(FailureKind::type, argument.name, " must be a float");
}

bool as_bool(Argument argument) {
  const int type = argument.value->type_index;
  if (type == kTVMFFIBool || type == kTVMFFIInt) return argument.value->v_int64 != 0;
  fail(FailureKind::type, argument.name, " must be a bool");
}

const char* as_text(Argument argument) {
  if (is_none(argument)) return nullptr;
  const int type = argument.value->type_index;
  if (type == kTVMFFIRawStr) return argument.value->v_c_str;
  if (type == kTVMFFISmallStr) return argument.value->v_bytes;  // at most 7 characters and a zero
  if (type == kTVMFFIStr) return TVMFFIBytesGetByteArrayPtr(argument.value->v_obj)->data;
  fail(FailureKind::type, argument.name, " must be a str");
}

void* as_stream(Argument argument, chiasma_device device) {
  if (device.kind == CHIASMA_CPU) return nullptr;
  if (is_none(argument)) return TVMFFIEnvGetStream(kDLCUDA, device.index);
  return reinterpret_cast<void*>(static_cast<std::uintptr_t>(as_int(argument)));  // an address from Python
}

chiasma_kv_format as_format(Argument format, Argument cache) {
  const std::int64_t number = as_int(format);
  if (number != 0) return static_cast<chiasma_kv_format>(number);
  const DLTensor& tensor = *as_dltensor(cache);
  const bool holds_bytes = is_bytes(tensor.dtype);
  if (!holds_bytes && !is_bfloat16(tensor.dtype)) {
    fail(FailureKind::type, cache.name, " has dtype ", dtype_text(tensor.dtype), "; it must be ",
         allowed_text(kBytes | kBfloat16));
  }
  const std::int64_t width = tensor.ndim > 0 ? tensor.shape[tensor.ndim - 1] : 0;
  const chiasma_kv_format inferred = infer_format(holds_bytes, width);
  if (inferred == kNoFormat) throw Failure{FailureKind::no_format, cache.name};
  return inferred;
}

double as_kv_scale(Argument argument) {
  if (is_none(argument)) return 0;
  const double kv_scale = as_double(argument);
  // Zero stands for 1 to the library, which is not what somebody means who computed it.
  if (kv_scale == 0) fail(FailureKind::value, "kv_scale is 0; it must be > 0, or None for 1");
  return kv_scale;
}

chiasma_tensor as_cache(Argument argument, chiasma_kv_format format) {
  return as_tensor(argument, holds_bytes(format) ? kBytes : kBfloat16);
}

}  // namespace chiasma::python
