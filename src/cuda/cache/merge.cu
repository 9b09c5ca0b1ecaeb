// merge: partial results to one. A warp a row (request, query token, head), 16 columns a lane, in float64.
#include "cuda/cache/rows.cuh"
#include "format/merge_math.h"

namespace chiasma::gpu {
namespace {

constexpr double kNoLse = -__builtin_inf();

template <bool kIsBf16>
__device__ __forceinline__ float load_element(const void* from, std::int64_t element) {
  if constexpr (kIsBf16) return to_float(bf16_t{__ldg(static_cast<const std::uint16_t*>(from) + element)});
  return __ldg(static_cast<const float*>(from) + element);
}

// 16 numbers of a part: a lane has columns 8 l to 8 l + 7 of each half of a row as vectors, or 16 in steps of 32.
template <bool kIsBf16, bool kAligned>
struct LaneValues {
  float value[kLaneColumns];

  __device__ LaneValues(const void* from, std::int64_t element, int lane) {
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      if constexpr (!kAligned) {
        for (int n = i; n < i + 4; ++n) value[n] = load_element<kIsBf16>(from, element + column_of(n, lane));
      } else if constexpr (kIsBf16) {
        const uint2 words = __ldg(
            reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(from) + element + column_of(i, lane)));
        value[i] = __uint_as_float(words.x << 16);
        value[i + 1] = __uint_as_float(words.x & 0xffff0000u);
        value[i + 2] = __uint_as_float(words.y << 16);
        value[i + 3] = __uint_as_float(words.y & 0xffff0000u);
      } else {
        const float4 four =
            __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(from) + element + column_of(i, lane)));
        value[i] = four.x;
        value[i + 1] = four.y;
        value[i + 2] = four.z;
        value[i + 3] = four.w;
      }
    }
  }
  // Four neighbours a lane, so that a warp's access is one stretch.
  static __device__ int column_of(int i, int lane) {
    return i / 4 * (4 * kWarp) + 4 * lane + i % 4;
  }
};

template <bool kToBf16, bool kAligned>
__device__ __forceinline__ void store_row(void* to, std::int64_t element, const float (&value)[kLaneColumns],
                                          int lane) {
  using Layout = LaneValues<kToBf16, kAligned>;
#pragma unroll
  for (int i = 0; i < kLaneColumns; i += 4) {
    const std::int64_t at = element + Layout::column_of(i, lane);
    if constexpr (kToBf16) {
      auto* out = static_cast<std::uint16_t*>(to) + at;
      if constexpr (kAligned) {
        const auto pair = [&](int n) {
          return to_bf16(value[n]).bits | static_cast<std::uint32_t>(to_bf16(value[n + 1]).bits) << 16;
        };
        *reinterpret_cast<uint2*>(out) = make_uint2(pair(i), pair(i + 2));
      } else {
        for (int n = 0; n < 4; ++n) out[n] = to_bf16(value[i + n]).bits;
      }
    } else {
      float* out = static_cast<float*>(to) + at;
      if constexpr (kAligned) {
        *reinterpret_cast<float4*>(out) = make_float4(value[i], value[i + 1], value[i + 2], value[i + 3]);
      } else {
        for (int n = 0; n < 4; ++n) out[n] = value[i + n];
      }
    }
  }
}

// Weights of up to 32 parts at a time, one a lane, so that each exponential is worked out once.
__device__ __forceinline__ double lse_of(const MergeProblem& problem, std::int64_t part_lse, std::int64_t part) {
  if (part >= problem.parts) return kNoLse;
  const auto lse = static_cast<double>(__ldg(problem.part_lse + part_lse + part * problem.part_lse_stride[0]));
  return problem.plus_infinity_is_empty && lse == -kNoLse ? kNoLse : lse;
}

__device__ __forceinline__ double largest_lse(const MergeProblem& problem, std::int64_t part_lse, int lane) {
  double most = kNoLse;
  // As on the CPU a NaN never is the largest.
  for (std::int64_t part = lane; part < problem.parts; part += kWarp) {
    const double lse = lse_of(problem, part_lse, part);
    most = most < lse ? lse : most;
  }
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, most, step);
    most = most < other ? other : most;
  }
  return most;
}

template <bool kFromBf16, bool kToBf16, bool kAligned>
__device__ __forceinline__ void merge_row(const MergeProblem& problem, std::int64_t row, int lane) {
  const std::int64_t query = row / problem.h_q;
  const std::int64_t at[3] = {query / problem.s_q, query % problem.s_q, row % problem.h_q};
  const auto offset = [&](const std::int64_t* stride) {
    return at[0] * stride[0] + at[1] * stride[1] + at[2] * stride[2];
  };
  const std::int64_t part_lse = offset(problem.part_lse_stride + 1);
  const std::int64_t part_out = offset(problem.part_out_stride + 1);
  const double most = largest_lse(problem, part_lse, lane);
  double sum = 0.0;
  double out[kLaneColumns];
#pragma unroll
  for (double& value : out) value = -0.0;  // WHY: 0.0 + -0.0 would lose the sign that a single part's zero has
  for (std::int64_t first = 0; first < problem.parts; first += kWarp) {
    const double own_lse = lse_of(problem, part_lse, first + lane);
    const double own_weight = own_lse == kNoLse ? 0.0 : exact::exp(exact::add(own_lse, -most));
    const int count = problem.parts - first < kWarp ? static_cast<int>(problem.parts - first) : kWarp;
    for (int n = 0; n < count; ++n) {
      if (__shfl_sync(0xffffffffu, own_lse, n) == kNoLse) continue;
      const double weight = __shfl_sync(0xffffffffu, own_weight, n);
      sum = exact::add(sum, weight);
      const LaneValues<kFromBf16, kAligned> values(problem.part_out,
                                                   part_out + (first + n) * problem.part_out_stride[0], lane);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        out[i] = exact::add(out[i], exact::multiply(weight, static_cast<double>(values.value[i])));
      }
    }
  }
  // With one part that is not empty weight and sum are 1, and both results pass unchanged.
  const bool all_empty = sum == 0.0;
  const double inverse = all_empty ? 0.0 : exact::divide(1.0, sum);
  float result[kLaneColumns];
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) {
    result[i] = all_empty ? 0.0f : exact::to_float32(exact::multiply(out[i], inverse));
  }
  store_row<kToBf16, kAligned>(problem.out, offset(problem.out_stride), result, lane);
  if (lane == 0) {
    problem.lse[offset(problem.lse_stride)] = exact::to_float32(all_empty ? kNoLse : exact::add(most, exact::log(sum)));
  }
}

template <bool kFromBf16, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock) merge_kernel(const __grid_constant__ MergeProblem problem) {
  const std::int64_t num_rows = problem.b * problem.s_q * problem.h_q;
  for (std::int64_t row = first_row(); row < num_rows; row += row_stride()) {
    merge_row<kFromBf16, kToBf16, kAligned>(problem, row, threadIdx.x % kWarp);
  }
}

bool is_whole_vectors(const std::int64_t* stride, int count) {
  return std::all_of(stride, stride + count, [](std::int64_t elements) { return elements % 4 == 0; });
}

template <bool kFromBf16, bool kToBf16>
void launch(const MergeProblem& problem, cudaStream_t stream) {
  const unsigned blocks = blocks_for_rows(problem.b * problem.s_q * problem.h_q);
  const bool is_aligned = is_multiple_of_16(problem.part_out) && is_multiple_of_16(problem.out) &&
                          is_whole_vectors(problem.part_out_stride, 4) && is_whole_vectors(problem.out_stride, 3);
  constexpr int kThreads = kWarp * kWarpsPerBlock;
  if (is_aligned) return merge_kernel<kFromBf16, kToBf16, true><<<blocks, kThreads, 0, stream>>>(problem);
  merge_kernel<kFromBf16, kToBf16, false><<<blocks, kThreads, 0, stream>>>(problem);
}

}  // namespace

Status merge(const MergeProblem& problem, const Place& place) {
  if (problem.b * problem.s_q * problem.h_q == 0) return {};
  const DeviceScope scope(place.device);
  CHIASMA_RETURN_IF_ERROR(scope.status());
  const auto stream = static_cast<cudaStream_t>(place.stream);
  if (problem.part_out_is_bf16) {
    problem.out_is_bf16 ? launch<true, true>(problem, stream) : launch<true, false>(problem, stream);
  } else {
    problem.out_is_bf16 ? launch<false, true>(problem, stream) : launch<false, false>(problem, stream);
  }
  return launched("launching the merge kernel");
}

}  // namespace chiasma::gpu
