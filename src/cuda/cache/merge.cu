// merge: partial results to one, in float64. A warp has some rows (request, query token, head) at a time: first a lane
// for each of their parts works out weights, then all lanes add the parts of one row after the other, 16 columns a
// lane.
#include "cuda/cache/rows.cuh"
#include "cuda/ptx/convert.cuh"
#include "format/merge_math.h"

namespace chiasma::gpu {
namespace {

constexpr double kNoLse = -__builtin_inf();

// Fewer warps than this for each multiprocessor would leave some without work.
constexpr std::int64_t kWantedWarps = 132 * 16;

// How a warp's lanes share rows.
struct Layout {
  int lanes_per_row;  // a power of two: no fewer than parts, or 32, which then come in turns
  int rows;           // at a time; rows * lanes_per_row <= 32
};

// 16 numbers of a part as they are stored: a lane has four neighbours in every 128 columns, so that a warp's access is
// one stretch.
__device__ __forceinline__ int column_of(int i, int lane) {
  return i / 4 * (4 * kWarp) + 4 * lane + i % 4;
}
template <bool kIsBf16, bool kAligned>
struct LaneValues {
  static constexpr int kWords = kIsBf16 ? kLaneColumns / 2 : kLaneColumns;
  std::uint32_t words[kWords];

  __device__ void load(const void* from, std::int64_t element, int lane) {
    using Element = std::conditional_t<kIsBf16, std::uint16_t, std::uint32_t>;
    const Element* row = static_cast<const Element*>(from) + element;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i += 4) {
      const Element* four = row + column_of(i, lane);
      if constexpr (!kAligned && kIsBf16) {
        words[i / 2] = __ldg(four) | std::uint32_t{__ldg(four + 1)} << 16;
        words[i / 2 + 1] = __ldg(four + 2) | std::uint32_t{__ldg(four + 3)} << 16;
      } else if constexpr (!kAligned) {
        for (int n = 0; n < 4; ++n) words[i + n] = __ldg(four + n);
      } else if constexpr (kIsBf16) {
        const uint2 loaded = __ldcs(reinterpret_cast<const uint2*>(four));
        words[i / 2] = loaded.x, words[i / 2 + 1] = loaded.y;
      } else {
        const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(four));
        words[i] = loaded.x, words[i + 1] = loaded.y, words[i + 2] = loaded.z, words[i + 3] = loaded.w;
      }
    }
  }
  __device__ float value(int i) const {
    if constexpr (!kIsBf16) return __uint_as_float(words[i]);
    return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  }
};

__device__ __forceinline__ std::uint32_t bf16_pair(float low, float high) {
  // PERF: the instruction rounds as to_bf16() does, but makes another NaN.
  if (isnan(low) || isnan(high)) return to_bf16(low).bits | std::uint32_t{to_bf16(high).bits} << 16;
  return ptx::pack_bf162(low, high);
}

template <bool kToBf16, bool kAligned>
__device__ __forceinline__ void store_row(void* to, std::int64_t element, const float (&value)[kLaneColumns],
                                          int lane) {
#pragma unroll
  for (int i = 0; i < kLaneColumns; i += 4) {
    const std::int64_t at = element + column_of(i, lane);
    if constexpr (kToBf16) {
      auto* out = static_cast<std::uint16_t*>(to) + at;
      if constexpr (kAligned) {
        *reinterpret_cast<uint2*>(out) =
            make_uint2(bf16_pair(value[i], value[i + 1]), bf16_pair(value[i + 2], value[i + 3]));
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

__device__ __forceinline__ double lse_of(const MergeProblem& problem, std::int64_t part_lse, std::int64_t part) {
  if (part >= problem.parts) return kNoLse;
  const auto lse = static_cast<double>(__ldg(problem.part_lse + part_lse + part * problem.part_lse_stride[0]));
  return problem.plus_infinity_is_empty && lse == -kNoLse ? kNoLse : lse;
}

// Of the lane's row; all its lanes get it.
__device__ __forceinline__ double largest_lse(const MergeProblem& problem, std::int64_t part_lse, int first_part,
                                              int lanes_per_row) {
  double most = kNoLse;
  // As on the CPU a NaN never is the largest.
  for (std::int64_t part = first_part; part < problem.parts; part += lanes_per_row) {
    const double lse = lse_of(problem, part_lse, part);
    most = most < lse ? lse : most;
  }
  for (int step = 1; step < lanes_per_row; step *= 2) {
    const double other = __shfl_xor_sync(0xffffffffu, most, step);
    most = most < other ? other : most;
  }
  return most;
}

// Where a row is, in elements.
struct RowOffsets {
  std::int64_t part_out, part_lse, out, lse;

  __device__ RowOffsets(const MergeProblem& problem, std::int64_t row) {
    const Divided by_head = divided(row, problem.h_q);
    const Divided by_query = divided(by_head.quotient, problem.s_q);
    const auto offset = [&](const std::int64_t* stride) {
      return by_query.quotient * stride[0] + by_query.rest * stride[1] + by_head.rest * stride[2];
    };
    part_out = offset(problem.part_out_stride + 1);
    part_lse = offset(problem.part_lse_stride + 1);
    out = offset(problem.out_stride);
    lse = offset(problem.lse_stride);
  }
};

// Adds `count` parts, the first of which is at `element`; lane first_lane + n knows the n-th one's weight, and its bit
// of there says that the part is not empty.
template <bool kFromBf16, bool kAligned>
__device__ __forceinline__ void add_parts(const MergeProblem& problem, std::int64_t element, int count, int first_lane,
                                          std::uint32_t there, double weight, double (&out)[kLaneColumns], int lane) {
  // PERF: 4 kB of a row are on their way before the first is waited for.
  constexpr int kAhead = !kAligned ? 1 : kFromBf16 ? 4 : 2;
  for (int first = 0; first < count; first += kAhead) {
    LaneValues<kFromBf16, kAligned> values[kAhead];
    const auto is_there = [&](int n) { return first + n < count && (there >> (first_lane + first + n) & 1) != 0; };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (is_there(n)) values[n].load(problem.part_out, element + (first + n) * problem.part_out_stride[0], lane);
    }
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (!is_there(n)) continue;
      const double own = __shfl_sync(0xffffffffu, weight, first_lane + first + n);
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        out[i] = exact::add(out[i], exact::multiply(own, static_cast<double>(values[n].value(i))));
      }
    }
  }
}

// Rows first_row to first_row + layout.rows - 1, those that there are.
template <bool kFromBf16, bool kToBf16, bool kAligned>
__device__ __forceinline__ void merge_rows(const MergeProblem& problem, const Layout& layout, std::int64_t first_row,
                                           std::int64_t num_rows, int lane) {
  const int num_lanes = layout.lanes_per_row;
  const int first_lane = lane & -num_lanes;
  const int rows = num_rows - first_row < layout.rows ? static_cast<int>(num_rows - first_row) : layout.rows;
  const int own_row = lane / num_lanes < rows ? lane / num_lanes : rows - 1;
  const RowOffsets at(problem, first_row + own_row);
  const double most = largest_lse(problem, at.part_lse, lane - first_lane, num_lanes);
  double sum = 0.0;
  double out[kLaneColumns];
  for (std::int64_t first = 0; first < problem.parts; first += num_lanes) {
    const int count = problem.parts - first < num_lanes ? static_cast<int>(problem.parts - first) : num_lanes;
    const double lse = lse_of(problem, at.part_lse, first + lane - first_lane);
    const double weight = lse == kNoLse ? 0.0 : exact::exp(exact::add(lse, -most));
    const std::uint32_t there = __ballot_sync(0xffffffffu, lse != kNoLse);
    for (int n = 0; n < count; ++n) sum = exact::add(sum, __shfl_sync(0xffffffffu, weight, first_lane + n));

    // With one part that is not empty weight and sum are 1, and both results pass unchanged.
    const bool is_last = first + num_lanes >= problem.parts;
    const double inverse = is_last && sum != 0.0 ? exact::divide(1.0, sum) : 0.0;
    if (is_last && lane < rows * num_lanes && lane == first_lane) {
      problem.lse[at.lse] = exact::to_float32(sum == 0.0 ? kNoLse : exact::add(most, exact::log(sum)));
    }
    // More rows than one have all their parts in this turn.
    for (int row = 0; row < rows; ++row) {
      const int lane_of_row = row * num_lanes;
      if (first == 0) {
#pragma unroll
        for (double& value : out) value = -0.0;  // WHY: 0.0 + -0.0 would lose the sign that a single part's zero has
      }
      const std::int64_t part_out = __shfl_sync(0xffffffffu, at.part_out, lane_of_row);
      add_parts<kFromBf16, kAligned>(problem, part_out + first * problem.part_out_stride[0], count, lane_of_row, there,
                                     weight, out, lane);
      if (!is_last) continue;
      const double scale = __shfl_sync(0xffffffffu, inverse, lane_of_row);
      const bool all_empty = __shfl_sync(0xffffffffu, sum, lane_of_row) == 0.0;
      float result[kLaneColumns];
#pragma unroll
      for (int i = 0; i < kLaneColumns; ++i) {
        result[i] = all_empty ? 0.0f : exact::to_float32(exact::multiply(out[i], scale));
      }
      store_row<kToBf16, kAligned>(problem.out, __shfl_sync(0xffffffffu, at.out, lane_of_row), result, lane);
    }
  }
}

template <bool kFromBf16, bool kToBf16, bool kAligned>
__global__ void __launch_bounds__(kWarp* kWarpsPerBlock)
    merge_kernel(const __grid_constant__ MergeProblem problem, const __grid_constant__ Layout layout) {
  const std::int64_t num_rows = problem.b * problem.s_q * problem.h_q;
  for (std::int64_t row = first_row() * layout.rows; row < num_rows; row += row_stride() * layout.rows) {
    merge_rows<kFromBf16, kToBf16, kAligned>(problem, layout, row, num_rows, threadIdx.x % kWarp);
  }
}

Layout layout_for(std::int64_t parts, std::int64_t num_rows) {
  Layout layout{1, 1};
  while (layout.lanes_per_row < kWarp && layout.lanes_per_row < parts) layout.lanes_per_row *= 2;
  while (2 * layout.rows * layout.lanes_per_row <= kWarp && num_rows / (2 * layout.rows) >= kWantedWarps) {
    layout.rows *= 2;
  }
  return layout;
}

bool is_whole_vectors(const std::int64_t* stride, int count) {
  return std::all_of(stride, stride + count, [](std::int64_t elements) { return elements % 4 == 0; });
}

template <bool kFromBf16, bool kToBf16>
void launch(const MergeProblem& problem, cudaStream_t stream) {
  const std::int64_t num_rows = problem.b * problem.s_q * problem.h_q;
  const Layout layout = layout_for(problem.parts, num_rows);
  const unsigned blocks = blocks_for_rows((num_rows + layout.rows - 1) / layout.rows);
  const bool is_aligned = is_multiple_of_16(problem.part_out) && is_multiple_of_16(problem.out) &&
                          is_whole_vectors(problem.part_out_stride, 4) && is_whole_vectors(problem.out_stride, 3);
  constexpr int kThreads = kWarp * kWarpsPerBlock;
  if (is_aligned) return merge_kernel<kFromBf16, kToBf16, true><<<blocks, kThreads, 0, stream>>>(problem, layout);
  merge_kernel<kFromBf16, kToBf16, false><<<blocks, kThreads, 0, stream>>>(problem, layout);
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
