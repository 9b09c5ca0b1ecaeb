#include "cuda/combine/combine.h"

#include <cmath>

#include "cuda/dependent_launch.h"
#include "cuda/ptx/convert.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/tile/sink.cuh"

namespace chiasma::combine {
namespace {

constexpr int kWarpThreads = 32;
constexpr int kWarps = 4;  // of a thread block
constexpr int kVectorsPerHead = kValueDim / 4;
constexpr int kVectorsInFlight = 16;  // of a thread, on their way together
constexpr unsigned kAllLanes = 0xffffffffu;

// How a thread block's warps share heads: few heads are merged by several warps each, many by one.
template <int kWarpsPerHead>
struct Sharing {
  static constexpr int kHeads = kWarps / kWarpsPerHead;  // of a thread block
  static constexpr int kThreads = kWarpsPerHead * kWarpThreads;
  static constexpr int kVectors = kVectorsPerHead / kThreads;  // of a thread, kThreads apart
  static constexpr int kParts = kVectorsInFlight / kVectors;   // whose values are on their way together
};

__device__ float warp_max(float value) {
  for (int step = kWarpThreads / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, step));
  return value;
}
__device__ float warp_sum(float value) {
  for (int step = kWarpThreads / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// Slots of a row's parts, one a lane: lane l has part first + l, and those 32 behind it in turn.
struct LanePart {
  std::int32_t slot = -1;  // -1: a group without work, or behind the last part
  float lse = -INFINITY;

  __device__ void find(const tile::Schedule& schedule, std::int32_t row, std::int32_t part, std::int32_t last) {
    slot = part <= last ? schedule.part_slot(row, part) : -1;
  }
  __device__ void load(const Params& params, int head) {
    lse = slot < 0 ? -INFINITY : params.part_lse[std::int64_t{slot} * params.problem.h_q + head];
  }
};

// Sum of exponentials of a head's parts. The order of the parts is fixed, and so are the bits.
struct Total {
  float most = -INFINITY;
  float sum = 0.0f;  // of exp(lse - most)
  bool any_nan = false;

  __device__ void add(float lse) {
    any_nan = any_nan || __any_sync(kAllLanes, isnan(lse));
    const float raised = fmaxf(most, warp_max(lse));
    if (raised == INFINITY) sum = 1.0f;
    if (raised != -INFINITY && raised != INFINITY) {
      sum = sum * (most == -INFINITY ? 0.0f : expf(most - raised)) + warp_sum(expf(lse - raised));
    }
    most = raised;
  }
  __device__ float lse() const {
    if (any_nan) return NAN;
    return most == -INFINITY || most == INFINITY ? most : most + logf(sum);
  }
};

// A thread's values of some parts of a head, from the lane's part `first` on.
template <typename Sharing>
struct Values {
  float4 of[Sharing::kParts][Sharing::kVectors];

  __device__ void load(const Params& params, std::int32_t lane_slot, int first, int head, int thread) {
#pragma unroll
    for (int part = 0; part < Sharing::kParts; ++part) {
      const std::int64_t slot = __shfl_sync(kAllLanes, lane_slot, first + part);
      const auto* values =
          reinterpret_cast<const float4*>(params.part_out + (slot * params.problem.h_q + head) * kValueDim);
#pragma unroll
      for (int i = 0; i < Sharing::kVectors; ++i) {
        of[part][i] = slot < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : values[i * Sharing::kThreads + thread];
      }
    }
  }

  // An empty part (not in `filled`) is an exact identity, and its values are whatever the memory held.
  __device__ void add_to(float4 (&sum)[Sharing::kVectors], float lane_weight, unsigned filled, int first) const {
#pragma unroll
    for (int part = 0; part < Sharing::kParts; ++part) {
      const float weight = __shfl_sync(kAllLanes, lane_weight, first + part);
      if ((filled >> (first + part) & 1u) == 0) continue;
#pragma unroll
      for (int i = 0; i < Sharing::kVectors; ++i) {
        sum[i].x += weight * of[part][i].x;
        sum[i].y += weight * of[part][i].y;
        sum[i].z += weight * of[part][i].z;
        sum[i].w += weight * of[part][i].w;
      }
    }
  }
};

// Of one head of a row: what its warps merge.
template <typename Sharing>
class HeadMerge {
 public:
  __device__ HeadMerge(const Params& params, std::int32_t row, int head, int thread)
      : params_(params), row_(row), head_(head), thread_(thread), lane_(thread % kWarpThreads) {
    first_ = params.schedule.first_part(row);
    last_ = params.schedule.last_part(row);
    own_.find(params.schedule, row, first_ + lane_, last_);
  }

  // PERF: the first values are on their way before anything is known of their weights.
  __device__ void run() {
    own_.load(params_, head_);
    values_.load(params_, own_.slot, 0, head_, thread_);
    const float lse = total_lse();
    for (std::int32_t part = first_; part <= last_; part += kWarpThreads) {
      if (part != first_) {
        own_.find(params_.schedule, row_, part + lane_, last_);
        own_.load(params_, head_);
      }
      add_parts(part, lse);
    }
    store(lse);
  }

 private:
  __device__ float total_lse() const {
    Total total;
    total.add(own_.lse);
    for (std::int32_t part = first_ + kWarpThreads; part <= last_; part += kWarpThreads) {
      LanePart other;
      other.find(params_.schedule, row_, part + lane_, last_);
      other.load(params_, head_);
      total.add(other.lse);
    }
    return total.lse();
  }

  // The lanes' parts, the first of which is `part`.
  __device__ void add_parts(std::int32_t part, float lse) {
    const unsigned filled = __ballot_sync(kAllLanes, own_.lse != -INFINITY);
    const float weight = expf(own_.lse - lse);
#pragma unroll 1
    for (int at = 0; at < kWarpThreads && part + at <= last_; at += Sharing::kParts) {
      if (part + at != first_) values_.load(params_, own_.slot, at, head_, thread_);
      values_.add_to(sum_, weight, filled, at);
    }
  }

  __device__ void store(float lse) const {
    const DecodeProblem& problem = params_.problem;
    float multiplier = 1.0f;
    if (problem.attn_sink != nullptr) {
      multiplier = tile::sink_multiplier(lse, problem.attn_sink[head_ * problem.attn_sink_stride]);
    }
    const std::int64_t request = row_ / static_cast<std::int32_t>(problem.s_q);
    const std::int64_t token = row_ - request * problem.s_q;
    bf16_t* out =
        problem.out + request * problem.out_stride_b + token * problem.out_stride_s + head_ * problem.out_stride_h;
#pragma unroll
    for (int i = 0; i < Sharing::kVectors; ++i) {
      const int vector = i * Sharing::kThreads + thread_;
      const uint2 words = make_uint2(ptx::pack_bf162(sum_[i].x * multiplier, sum_[i].y * multiplier),
                                     ptx::pack_bf162(sum_[i].z * multiplier, sum_[i].w * multiplier));
      if (params_.out_is_vectors) {
        reinterpret_cast<uint2*>(out)[vector] = words;
      } else {
        store_by_numbers(out + 4 * vector, words);
      }
    }
    if (thread_ == 0) {
      problem.lse[request * problem.lse_stride_b + token * problem.lse_stride_s + head_ * problem.lse_stride_h] = lse;
    }
  }

  __device__ static void store_by_numbers(bf16_t* to, const uint2& words) {
    to[0].bits = static_cast<std::uint16_t>(words.x);
    to[1].bits = static_cast<std::uint16_t>(words.x >> 16);
    to[2].bits = static_cast<std::uint16_t>(words.y);
    to[3].bits = static_cast<std::uint16_t>(words.y >> 16);
  }

  const Params& params_;
  std::int32_t row_;
  int head_, thread_, lane_;
  std::int32_t first_, last_;  // parts of the row
  LanePart own_;
  Values<Sharing> values_;
  float4 sum_[Sharing::kVectors] = {};
};

template <typename Sharing>
__global__ void __launch_bounds__(kWarps* kWarpThreads) combine_kernel(const __grid_constant__ Params params) {
  const int head = blockIdx.y * Sharing::kHeads + threadIdx.x / Sharing::kThreads;
  const std::int32_t row = params.schedule.split_row(static_cast<std::int32_t>(blockIdx.x));
  if (row < 0 || head >= params.problem.h_q) {
    // SYNC: whoever waits for this grid relies on the one before to be done as well.
    ptx::grid_dependency_wait();
    return;
  }
  HeadMerge<Sharing> merge(params, row, head, threadIdx.x % Sharing::kThreads);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  merge.run();
}

template <typename Sharing>
cudaError_t launch_with(const Params& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.schedule.num_candidates()),
                  static_cast<unsigned>((params.problem.h_q + Sharing::kHeads - 1) / Sharing::kHeads));
  return gpu::launch_dependent(combine_kernel<Sharing>, {grid, kWarps * kWarpThreads, 0}, params, stream);
}

}  // namespace

cudaError_t launch(const Params& params, cudaStream_t stream) {
  if (params.schedule.num_candidates() <= 0) return cudaSuccess;
  // PERF: two warps a head are faster for few heads, one for many, four never (H200, 2026-11-30: 16 parts of 128 heads
  // 2.6 against 3.7 us, 4 parts of 2,048 heads 5.2 against 3.9 us).
  if (is_large(params.schedule, params.problem.h_q)) return launch_with<Sharing<1>>(params, stream);
  return launch_with<Sharing<2>>(params, stream);
}

}  // namespace chiasma::combine
