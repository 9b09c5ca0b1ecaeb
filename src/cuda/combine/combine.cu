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
constexpr int kPartsAtOnce = 4;                           // whose values are on their way together

// Slots of a row's parts, one a lane: lane l has part first + l, and those 32 behind it in turn.
struct LanePart {
  std::int32_t slot = -1;  // -1: a group without work, or behind the last part
  float lse = -INFINITY;

  __device__ void load(const Params& params, std::int32_t row, std::int32_t part, std::int32_t last, int head) {
    slot = part <= last ? params.schedule.part_slot(row, part) : -1;
    lse = slot < 0 ? -INFINITY : params.part_lse[std::int64_t{slot} * params.problem.h_q + head];
  }
};

__device__ float warp_max(float value) {
  for (int step = kWarpThreads / 2; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  return value;
}
__device__ float warp_sum(float value) {
  for (int step = kWarpThreads / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

// Total of a row's parts. The order of the parts is fixed, and so are the bits.
__device__ float merged_lse(const Params& params, std::int32_t row, std::int32_t first, std::int32_t last, int head,
                            int lane) {
  float most = -INFINITY;
  float sum = 0.0f;  // of exp(lse - most)
  bool any_nan = false;
  for (std::int32_t part = first; part <= last; part += kWarpThreads) {
    LanePart own;
    own.load(params, row, part + lane, last, head);
    any_nan = any_nan || __any_sync(0xffffffffu, isnan(own.lse));
    const float raised = fmaxf(most, warp_max(own.lse));
    if (raised == INFINITY) sum = 1.0f;
    if (raised != -INFINITY && raised != INFINITY) {
      sum = sum * (most == -INFINITY ? 0.0f : expf(most - raised)) + warp_sum(expf(own.lse - raised));
    }
    most = raised;
  }
  if (any_nan) return NAN;
  if (most == -INFINITY || most == INFINITY) return most;
  return most + logf(sum);
}

__device__ void add_weighted(float (&values)[kValuesPerLane], const float4 (&part)[kValuesPerLane / 4], float weight) {
#pragma unroll
  for (int i = 0; i < kValuesPerLane / 4; ++i) {
    values[i * 4] += weight * part[i].x;
    values[i * 4 + 1] += weight * part[i].y;
    values[i * 4 + 2] += weight * part[i].z;
    values[i * 4 + 3] += weight * part[i].w;
  }
}

// Adds up to 32 parts, one a lane, in their order.
__device__ void add_parts(float (&values)[kValuesPerLane], const Params& params, const LanePart& own, float lse,
                          int head, int lane) {
  // An empty part is an exact identity, and its out is unwritten.
  unsigned pending = __ballot_sync(0xffffffffu, own.lse != -INFINITY);
  const float own_weight = expf(own.lse - lse);
  while (pending != 0) {
    float4 loaded[kPartsAtOnce][kValuesPerLane / 4];
    float weight[kPartsAtOnce];
#pragma unroll
    for (int at = 0; at < kPartsAtOnce; ++at) {
      const int source = pending != 0 ? __ffs(static_cast<int>(pending)) - 1 : 0;
      weight[at] = pending != 0 ? __shfl_sync(0xffffffffu, own_weight, source) : 0.0f;
      const std::int64_t slot = __shfl_sync(0xffffffffu, own.slot, source);
      const auto* out =
          reinterpret_cast<const float4*>(params.part_out + (slot * params.problem.h_q + head) * kValueDim);
#pragma unroll
      for (int i = 0; i < kValuesPerLane / 4; ++i) {
        loaded[at][i] = pending != 0 ? out[i * kWarpThreads + lane] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      pending &= pending - 1;
    }
#pragma unroll
    for (int at = 0; at < kPartsAtOnce; ++at) add_weighted(values, loaded[at], weight[at]);
  }
}

__device__ void store(const Params& params, std::int64_t request, std::int64_t token, int head, int lane,
                      const float (&values)[kValuesPerLane]) {
  const DecodeProblem& problem = params.problem;
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
  const std::int32_t row = params.schedule.split_row(static_cast<std::int32_t>(blockIdx.x));
  const bool has_work = row >= 0 && head < problem.h_q;
  const std::int32_t first = has_work ? params.schedule.first_part(row) : 0;
  const std::int32_t last = has_work ? params.schedule.last_part(row) : -1;
  ptx::grid_dependency_wait();
  if (!has_work) return;
  const float lse = merged_lse(params, row, first, last, head, lane);
  float values[kValuesPerLane] = {};
  for (std::int32_t part = first; part <= last; part += kWarpThreads) {
    LanePart own;
    own.load(params, row, part + lane, last, head);
    add_parts(values, params, own, lse, head, lane);
  }
  if (problem.attn_sink != nullptr) {
    const float multiplier = tile::sink_multiplier(lse, problem.attn_sink[head * problem.attn_sink_stride]);
#pragma unroll
    for (float& value : values) value *= multiplier;
  }
  const std::int64_t request = row / problem.s_q;
  const std::int64_t token = row - request * problem.s_q;
  store(params, request, token, head, lane, values);
  if (lane == 0) {
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
