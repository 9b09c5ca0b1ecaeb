#include "cuda/combine/combine.h"

#include <cmath>

#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/sink.cuh"

namespace chiasma::combine {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kHeadsPerBlock = 4;                         // one a warp
constexpr int kValuesPerLane = kValueDim / kWarpThreads;  // 16: four groups of four, 128 apart

struct Parts {
  const Params& params;
  std::int64_t row, first, last;
  int head;

  // lse of a part; -infinity also for a group without work.
  __device__ float lse(std::int64_t part) const {
    const std::int64_t slot = params.schedule.part_slot(row, part);
    return slot < 0 ? -INFINITY : params.part_lse[slot * params.problem.h_q + head];
  }
  __device__ const float4* out(std::int64_t part) const {
    const std::int64_t slot = params.schedule.part_slot(row, part);
    return reinterpret_cast<const float4*>(params.part_out + (slot * params.problem.h_q + head) * kValueDim);
  }
};

// Total of a row's parts. The order of the parts is fixed, and so are the bits.
__device__ float merged_lse(const Parts& parts) {
  float most = -INFINITY;
  bool any_nan = false;
  for (std::int64_t part = parts.first; part <= parts.last; ++part) {
    const float lse = parts.lse(part);
    any_nan = any_nan || isnan(lse);
    most = fmaxf(most, lse);
  }
  if (any_nan) return NAN;
  if (most == -INFINITY || most == INFINITY) return most;
  float sum = 0.0f;
  for (std::int64_t part = parts.first; part <= parts.last; ++part) sum += expf(parts.lse(part) - most);
  return most + logf(sum);
}

__device__ void store(const Params& params, std::int64_t row, int head, int lane,
                      const float (&values)[kValuesPerLane]) {
  const DecodeProblem& problem = params.problem;
  const std::int64_t request = row / problem.s_q;
  const std::int64_t token = row - request * problem.s_q;
  bf16_t* out =
      problem.out + request * problem.out_stride_b + token * problem.out_stride_s + head * problem.out_stride_h;
#pragma unroll
  for (int i = 0; i < kValuesPerLane; i += 4) {
    *reinterpret_cast<uint2*>(out + i / 4 * 128 + lane * 4) =
        make_uint2(ptx::pack_bf162(values[i], values[i + 1]), ptx::pack_bf162(values[i + 2], values[i + 3]));
  }
}

__global__ void __launch_bounds__(kHeadsPerBlock* kWarpThreads) combine_kernel(const __grid_constant__ Params params) {
  const DecodeProblem& problem = params.problem;
  const int lane = threadIdx.x % kWarpThreads;
  const int head = blockIdx.y * kHeadsPerBlock + threadIdx.x / kWarpThreads;
  const std::int64_t row = params.schedule.split_row(blockIdx.x);
  ptx::grid_dependency_wait();
  if (row < 0 || head >= problem.h_q) return;
  const Parts parts{params, row, params.schedule.first_part(row), params.schedule.last_part(row), head};
  const float lse = merged_lse(parts);
  float values[kValuesPerLane] = {};
  for (std::int64_t part = parts.first; part <= parts.last; ++part) {
    const float part_lse = parts.lse(part);
    if (part_lse == -INFINITY) continue;  // an exact identity, and its out is unwritten
    const float weight = expf(part_lse - lse);
    const float4* out = parts.out(part);
#pragma unroll
    for (int i = 0; i < kValuesPerLane / 4; ++i) {
      const float4 value = out[i * kWarpThreads + lane];
      values[i * 4] += weight * value.x;
      values[i * 4 + 1] += weight * value.y;
      values[i * 4 + 2] += weight * value.z;
      values[i * 4 + 3] += weight * value.w;
    }
  }
  if (problem.attn_sink != nullptr) {
    const float multiplier = tile::sink_multiplier(lse, problem.attn_sink[head * problem.attn_sink_stride]);
#pragma unroll
    for (float& value : values) value *= multiplier;
  }
  store(params, row, head, lane, values);
  if (lane == 0) {
    const std::int64_t request = row / problem.s_q;
    const std::int64_t token = row - request * problem.s_q;
    problem.lse[request * problem.lse_stride_b + token * problem.lse_stride_s + head * problem.lse_stride_h] = lse;
  }
}

}  // namespace

cudaError_t launch(const Params& params, cudaStream_t stream) {
  const std::int64_t candidates = params.schedule.num_candidates();
  if (candidates <= 0) return cudaSuccess;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(candidates),
                        static_cast<unsigned>((params.problem.h_q + kHeadsPerBlock - 1) / kHeadsPerBlock));
  config.blockDim = dim3(kHeadsPerBlock * kWarpThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, combine_kernel, params);
}

}  // namespace chiasma::combine
