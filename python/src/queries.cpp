// What the library can tell about itself and the machine.
#include <tvm/ffi/container/array.h>

#include "arguments.h"
#include "boundary.h"

#ifdef CHIASMA_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace chiasma::python {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::String;

Result version(Arguments) {
  return Array<Any>{String(chiasma_version())};
}

// [[name, kind, summary, supports], ...]
Result kernels(Arguments) {
  Array<Any> list;
  for (std::int32_t number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info{};
    check(chiasma_kernel_query(number, &info));
    list.push_back(
        Array<Any>{String(info.name), std::int64_t{info.device_kind}, String(info.summary), String(info.supports)});
  }
  return list;
}

// [[kind, index, name, compute_units, cuda_capability, memory_bytes], ...]
Result devices(Arguments) {
  Array<Any> list;
  for (std::int32_t number = 0; number < chiasma_device_count(); ++number) {
    chiasma_device_info info{};
    check(chiasma_device_query(number, &info));
    list.push_back(Array<Any>{std::int64_t{info.device.kind}, std::int64_t{info.device.index}, String(info.name),
                              std::int64_t{info.compute_units}, std::int64_t{info.cuda_capability}, info.memory_bytes});
  }
  return list;
}

// [[name, key width, last extent of a cache, whether that is bytes, whether it and the dtype tell the format], ...],
// number 1 first.
Result formats(Arguments) {
  Array<Any> list;
  for (int number = 1;; ++number) {
    const auto format = static_cast<chiasma_kv_format>(number);
    const std::int64_t width = chiasma_kv_width(format);
    if (width == 0) return list;
    const bool bytes = holds_bytes(format);
    list.push_back(Array<Any>{String(chiasma_kv_format_name(format)), std::int64_t{chiasma_kv_dim(format)}, width,
                              bytes, infer_format(bytes, width) == format});
  }
}

// format, page: the bytes between two pages of a new cache.
Result page_bytes(Arguments arguments) {
  const auto format = static_cast<chiasma_kv_format>(as_int({"format", &arguments[0]}));
  return Array<Any>{chiasma_kv_page_bytes(format, as_int({"page", &arguments[1]}))};
}

// index, stream: waits for what is queued there; for frameworks whose arrays are used on streams of their own.
Result synchronize([[maybe_unused]] Arguments arguments) {
#ifdef CHIASMA_HAS_CUDA
  const auto index = static_cast<int>(as_int({"index", &arguments[0]}));
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(index);
  if (error == cudaSuccess) {
    error =
        cudaStreamSynchronize(static_cast<cudaStream_t>(as_stream({"stream", &arguments[1]}, {CHIASMA_CUDA, index})));
    cudaSetDevice(before);
  }
  if (error != cudaSuccess) fail(FailureKind::runtime, "waiting for cuda:", index, ": ", cudaGetErrorString(error));
#endif
  return nullptr;
}

}  // namespace

CHIASMA_PYTHON_EXPORT(version, version, 0)
CHIASMA_PYTHON_EXPORT(kernels, kernels, 0)
CHIASMA_PYTHON_EXPORT(devices, devices, 0)
CHIASMA_PYTHON_EXPORT(formats, formats, 0)
CHIASMA_PYTHON_EXPORT(page_bytes, page_bytes, 2)
CHIASMA_PYTHON_EXPORT(synchronize, synchronize, 2)

}  // namespace chiasma::python
