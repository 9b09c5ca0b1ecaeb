#include "cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

namespace chiasma::gpu {

Status to_status(int error, const char* operation) {
  const auto code = static_cast<cudaError_t>(error);
  if (code == cudaSuccess) return {};
  return {CHIASMA_DEVICE_ERROR, concat(operation, " failed: ", cudaGetErrorName(code), ", ", cudaGetErrorString(code))};
}

Status available() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();  // the failure is reported here; it must not surface at a later call
    return {CHIASMA_DEVICE_UNAVAILABLE,
            concat("no CUDA device can be used: ", cudaGetErrorString(error), "; available devices: cpu")};
  }
  return {};
}

std::int32_t device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

Status query_device(std::int32_t index, chiasma_device_info* info) {
  CHIASMA_RETURN_IF_ERROR(available());
  if (index < 0 || index >= device_count()) {
    return {CHIASMA_DEVICE_UNAVAILABLE, concat("no device cuda:", index, "; this machine has ", device_count())};
  }
  cudaDeviceProp properties;
  CHIASMA_RETURN_IF_ERROR(to_status(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties"));
  *info = {};
  info->device = {CHIASMA_CUDA, index};
  const std::size_t length = std::min(std::strlen(properties.name), sizeof(info->name) - 1);
  std::memcpy(info->name, properties.name, length);
  info->compute_units = properties.multiProcessorCount;
  info->cuda_capability = properties.major * 10 + properties.minor;
  info->memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  return {};
}

DeviceScope::DeviceScope(std::int32_t index) {
  status_ = to_status(cudaGetDevice(&previous_), "cudaGetDevice");
  if (!status_.ok() || previous_ == index) return;
  status_ = to_status(cudaSetDevice(index), "cudaSetDevice");
  switched_ = status_.ok();
}

DeviceScope::~DeviceScope() {
  if (switched_) cudaSetDevice(previous_);
}

}  // namespace chiasma::gpu
