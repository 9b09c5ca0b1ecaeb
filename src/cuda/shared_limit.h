// Raises a kernel's limit of dynamic shared memory on a device, once: doing it twice is harmless. Host code.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cuda/runtime.h"

namespace chiasma::gpu {

// device: the current one.
template <auto kKernel>
Status raise_shared_limit(std::int32_t device, std::size_t bytes) {
  constexpr int kMaxDevices = 64;
  static std::atomic<bool> done[kMaxDevices];
  if (device < kMaxDevices && done[device].load(std::memory_order_acquire)) return {};
  CHIASMA_RETURN_IF_ERROR(
      to_status(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                "cudaFuncSetAttribute"));
  if (device < kMaxDevices) done[device].store(true, std::memory_order_release);
  return {};
}

}  // namespace chiasma::gpu
