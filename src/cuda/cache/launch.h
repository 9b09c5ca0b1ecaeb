// The cache operations and merge on a CUDA device, with the bits of src/cpu/cache_ops.h. Each queues its work on
// `stream` (a cudaStream_t) of `device` and returns. README.md is their design card. No CUDA header is needed to
// include this.
#pragma once

#include <cstdint>

#include "api/problem.h"
#include "api/status.h"

namespace chiasma::gpu {

struct Place {
  std::int32_t device;
  void* stream;
};

Status quantize(const QuantizeProblem& problem, const Place& place);
Status dequantize(const DequantizeProblem& problem, const Place& place);
Status gather_dequantize(const GatherProblem& problem, const Place& place);
Status translate_indices(const TranslateProblem& problem, const Place& place);
Status merge(const MergeProblem& problem, const Place& place);

}  // namespace chiasma::gpu
