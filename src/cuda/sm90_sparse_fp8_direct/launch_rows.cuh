// What every rows_*.cu holds: the kernels of one format, by the heads of a thread block.
#pragma once

#include <cuda_runtime.h>

#include "cuda/dependent_launch.h"
#include "cuda/runtime.h"
#include "cuda/shared_limit.h"
#include "cuda/sm90_sparse_fp8_direct/kernel.cuh"
#include "cuda/sm90_sparse_fp8_direct/launch_rows.h"

namespace chiasma::sm90_sparse_fp8_direct {

template <typename Config>
Status launch_config(const SplitParams& params, const Launch& launch) {
  const auto h_q = static_cast<unsigned>(params.problem.h_q);
  const unsigned blocks = launch.num_groups * ((h_q + Config::kHeads - 1) / Config::kHeads);
  CHIASMA_RETURN_IF_ERROR(gpu::raise_shared_limit<decode_kernel<Config>>(launch.device, sizeof(SmemPlan<Config>)));
  return gpu::to_status(gpu::launch_dependent(decode_kernel<Config>, {dim3(blocks), kThreads, sizeof(SmemPlan<Config>)},
                                              params, static_cast<cudaStream_t>(launch.stream)),
                        "launching the decode kernel");
}

template <KvFormat kFormat>
Status launch_rows(const SplitParams& params, const Launch& launch) {
  static_assert(kFits<kFormat>);
  if (!params.q_is_vectors || !params.out_is_vectors) {
    return launch_config<Config<kFormat, kHeadsPerCtaByNumbers, false>>(params, launch);
  }
  switch (launch.heads_per_block) {
    case 8: return launch_config<Config<kFormat, 8>>(params, launch);
    case 16: return launch_config<Config<kFormat, 16>>(params, launch);
    case 32: return launch_config<Config<kFormat, 32>>(params, launch);
    default: return launch_config<Config<kFormat, Rows<kFormat>::kMostHeadsPerCta>>(params, launch);
  }
}

}  // namespace chiasma::sm90_sparse_fp8_direct
