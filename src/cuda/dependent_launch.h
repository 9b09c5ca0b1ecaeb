// Launches a kernel that may start before the one ahead of it in the stream has ended (programmatic dependent launch):
// its thread blocks are then in place when that one is done. Such a kernel calls ptx::grid_dependency_wait() in every
// thread before that thread touches global memory, and before it exits. Host code.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

namespace chiasma::gpu {

struct LaunchShape {
  dim3 grid;
  int threads;
  std::size_t shared_bytes;
};

template <typename Params>
cudaError_t launch_dependent(void (*kernel)(Params), const LaunchShape& shape, const Params& params,
                             cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  // The failure is reported here; it must not surface at a later call.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace chiasma::gpu
