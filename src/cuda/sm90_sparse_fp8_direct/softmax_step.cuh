// Stage softmax_step: raw sums to probabilities relative to a running reference, in f16 in shared memory.
//
// A token's scales are divided by its unit before PV; P is multiplied by it. (Below `unit` is its log2.) So the
// exponent of P is log2 score + unit, and the reference follows that, while the sum of probabilities is free of units.
//
// FarSums. That sum adds 2^exponent * 2^-unit. The first factor is 0 below 2^-126, which is less than 2^-80 of the
// whole while units lie within 2^45 of 1: then some term is at least 2^-45, and what is lost is below 2^(45 - 126). A
// block with another unit sends the rest of its piece to far sums: every head has a reference of its own for them,
// which follows the largest exponent without unit, and a term is one power, 2^(exponent - unit - far reference).
#pragma once

#include <cmath>

#include "cuda/ptx/matrix_move.cuh"
#include "cuda/ptx/sync.cuh"
#include "cuda/sm90_sparse_fp8_direct/prepare_factors.cuh"
#include "cuda/sm90_sparse_fp8_direct/score_qk.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

// Exponents of the units of a lane's two tokens; -infinity for a masked token, whose probability is 0; NaN for one
// that needs care.
using TokenUnits = float[2];

// 1 / unit; for a masked token any number, since it multiplies a 0.
__device__ __forceinline__ float inverse_unit(float exponent) {
  return exponent == -INFINITY ? 0.0f : ptx::exp2_approx(-exponent);
}

// A thread's running sums of its share of the tokens, for its heads 8 j + 2 (lane % 4) and + 1 at [j]. Threads of the
// two math warpgroups that stand at the same place share them, in turns.
template <typename Config>
__device__ __forceinline__ float2* thread_sums(SmemPlan<Config>& smem, int warp, int lane, int kind = 0) {
  return &smem.sums[kind][0][warp * kWarpThreads + lane];
}

// A number of the thread for each of its heads, in the order of head_of().
template <typename Config>
using OfHeads = float[Config::kHeads / 4];

// Combines the numbers of the lanes that share heads (lane / 4 differs). PERF: all heads a step, since a shuffle takes
// its time.
template <int kCount, typename Combine>
__device__ __forceinline__ void reduce_over_rows(float (&numbers)[kCount], Combine&& combine) {
#pragma unroll
  for (int step = 4; step < kWarpThreads; step *= 2) {
#pragma unroll
    for (float& number : numbers) number = combine(number, __shfl_xor_sync(0xffffffffu, number, step));
  }
}

// scores [4 j + 2 r + c] become log2 scores plus unit, relative to the head's reference. Returns the largest.
template <typename Config>
__device__ __forceinline__ float to_exponents(ptx::Accumulator<Config::kHeads>& scores, const SmemPlan<Config>& smem,
                                              const TokenUnits& units, int lane) {
  // Four maxima, so that none waits for the one before.
  float most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll
  for (int j = 0; j < Config::kHeads / 8; ++j) {
    const float4 pair = *reinterpret_cast<const float4*>(&smem.head[8 * j + lane % 4 * 2]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores[4 * j + i];
      score = (i % 2 == 0 ? fmaf(score, pair.x, -pair.y) : fmaf(score, pair.z, -pair.w)) + units[i / 2];
      most[i] = fmaxf(most[i], score);
    }
  }
  return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

// The heads of a lane's numbers [4 j + 2 r + c], h = 2 j + c: where those of r = 0 lie, and which head that is.
__device__ __forceinline__ constexpr int place_of(int h) {
  return h / 2 * 4 + h % 2;
}
__device__ __forceinline__ int head_of(int h, int lane) {
  return h / 2 * 8 + lane % 4 * 2 + h % 2;
}

// By the first lanes of each warp, to its line of of_warp.
template <typename Config>
__device__ __forceinline__ void store_of_heads(const OfHeads<Config>& numbers, SmemPlan<Config>& smem, int warp,
                                               int lane) {
#pragma unroll
  for (int h = 0; h < Config::kHeads / 4; ++h) {
    if (lane < 4) smem.of_warp[warp][head_of(h, lane)] = numbers[h];
  }
}

// Each warp's maxima over its tokens of numbers [4 j + 2 r + c] less `offsets`, for block_maximum().
template <typename Config>
__device__ __forceinline__ void store_maxima(const ptx::Accumulator<Config::kHeads>& numbers, SmemPlan<Config>& smem,
                                             const TokenUnits& offsets, int warp, int lane) {
  OfHeads<Config> most;
#pragma unroll
  for (int h = 0; h < Config::kHeads / 4; ++h) {
    most[h] = fmaxf(numbers[place_of(h)] - offsets[0], numbers[place_of(h) + 2] - offsets[1]);
  }
  reduce_over_rows(most, [](float a, float b) { return fmaxf(a, b); });
  store_of_heads<Config>(most, smem, warp, lane);
}
template <typename Config>
__device__ __forceinline__ float block_maximum(const SmemPlan<Config>& smem, int head) {
  return fmaxf(fmaxf(smem.of_warp[0][head], smem.of_warp[1][head]),
               fmaxf(smem.of_warp[2][head], smem.of_warp[3][head]));
}

// Seldom: some head's score left its reference behind, or these are the first valid tokens of a piece. Raises the
// references of all heads to what has been seen. All threads of a group; exponents and sums follow.
template <typename Config>
__device__ __forceinline__ void raise_references(ptx::Accumulator<Config::kHeads>& exponents, SmemPlan<Config>& smem,
                                                 int group, bool is_first, bool far_sums, int warp) {
  const int lane = ptx::lane_id_here();
  constexpr TokenUnits kNoOffset = {0.0f, 0.0f};
  Rescale<Config>& rescale = smem.rescale[group];
  store_maxima<Config>(exponents, smem, kNoOffset, warp, lane);
  ptx::named_barrier_sync(kGroupBarrier + group, kWarpgroupThreads);
  const int head = warp * kWarpThreads + lane;
  if (head < Config::kHeads) {
    const float most = block_maximum(smem, head);
    const float old = smem.head[head].reference;
    // Never by more than `most`, or all that is left would be lost where references are so large that sums are rounded.
    const float raised = (is_first || most > 0.0f) && most != -INFINITY ? __fadd_rd(old, most) : old;
    const float raise = raised - old;
    smem.head[head].reference = raised;
    smem.raise[head] = raise;
    if (far_sums) smem.far_reference[head] -= raise;
    // Before the first valid token there is nothing to rescale, and references may fall.
    rescale.by[head] = is_first ? 1.0f : ptx::exp2_approx(-raise);
  }
  if (warp == 0 && lane == 0) rescale.needed = is_first ? 0 : 1;
  ptx::named_barrier_sync(kGroupBarrier + group, kWarpgroupThreads);
#pragma unroll
  for (int h = 0; h < Config::kHeads / 4; ++h) {
    const int own = head_of(h, lane);
#pragma unroll
    for (int at = place_of(h); at <= place_of(h) + 2; at += 2) {
      exponents[at] -= smem.raise[own];
      // A NaN stays one.
      if (exponents[at] > kLazyRaiseLog2) exponents[at] = kLazyRaiseLog2;
    }
#pragma unroll
    for (int kind = 0; kind < Config::kSums; ++kind) {
      float* sum = reinterpret_cast<float*>(thread_sums(smem, warp, lane, kind) + h / 2 * kWarpgroupThreads) + h % 2;
      if (!far_sums) *sum *= rescale.by[own];
    }
  }
}

// Seldom: sums grow by the probabilities without units, where units are far apart. All threads of a group.
template <typename Config>
__device__ __forceinline__ void add_far_sums(const ptx::Accumulator<Config::kHeads>& exponents, SmemPlan<Config>& smem,
                                             int group, const TokenUnits& units, int warp) {
  const int lane = ptx::lane_id_here();
  // A masked token's exponent is -infinity and stays that.
  const TokenUnits offsets = {units[0] == -INFINITY ? 0.0f : units[0], units[1] == -INFINITY ? 0.0f : units[1]};
  store_maxima<Config>(exponents, smem, offsets, warp, lane);
  ptx::named_barrier_sync(kGroupBarrier + group, kWarpgroupThreads);
  const int head = warp * kWarpThreads + lane;
  if (head < Config::kHeads) {
    const float old = smem.far_reference[head];
    const float raised = fmaxf(old, block_maximum(smem, head));
    smem.raise[head] = raised == -INFINITY ? 0.0f : raised - old;
    smem.far_reference[head] = raised;
  }
  ptx::named_barrier_sync(kGroupBarrier + group, kWarpgroupThreads);
#pragma unroll
  for (int h = 0; h < Config::kHeads / 4; ++h) {
    const int own = head_of(h, lane);
    // Nothing but exponents of -infinity so far: any number will do.
    const float reference = smem.far_reference[own] == -INFINITY ? 0.0f : smem.far_reference[own];
    float* sum = reinterpret_cast<float*>(thread_sums(smem, warp, lane) + h / 2 * kWarpgroupThreads) + h % 2;
    *sum = *sum * ptx::exp2_approx(-smem.raise[own]) +
           ptx::exp2_approx(exponents[place_of(h)] - offsets[0] - reference) +
           ptx::exp2_approx(exponents[place_of(h) + 2] - offsets[1] - reference);
  }
}

// Exponents to P in shared memory; sums grow by the probabilities times `inverse`, of the lane's tokens.
template <typename Config>
__device__ __forceinline__ void store_probabilities(ptx::Accumulator<Config::kHeads>& exponents, SmemPlan<Config>& smem,
                                                    Probabilities& probabilities, const TokenFactors& inverse, int warp,
                                                    int lane) {
  constexpr int kGroups = Config::kHeads / 8;
  // PERF: all exponentials before anything that needs one, since they come from a unit with a queue.
#pragma unroll
  for (float& value : exponents) value = ptx::exp2_approx(value);
  const std::uint32_t p = ptx::shared_address(&probabilities);
  float2* sums = thread_sums(smem, warp, lane);
  // Rows are swizzled by an exclusive or of the chunk's number, so that chunks differ by one as well.
  const std::uint32_t row = warp * kTokensPerWarp + lane % 16;
  const std::uint32_t first_chunk = p + tile::chunk_offset(row, kGroups == 1 ? 0 : lane / 16);
  std::uint32_t packed[kGroups][2];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    float2 sum = sums[j * kWarpgroupThreads];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float even = exponents[4 * j + 2 * r];
      const float odd = exponents[4 * j + 2 * r + 1];
      sum.x = fmaf(even, inverse[r], sum.x);
      sum.y = fmaf(odd, inverse[r], sum.y);
      packed[j][r] = Config::kIsBf16 ? ptx::pack_bf162(even, odd) : ptx::pack_half2(even, odd);
    }
    sums[j * kWarpgroupThreads] = sum;
    if constexpr (Config::kIsBf16) {
      float2& rounded = thread_sums(smem, warp, lane, 1)[j * kWarpgroupThreads];
      // A masked token's probability is 0, and there are no units.
      rounded = make_float2(
          rounded.x + __uint_as_float(packed[j][0] << 16) + __uint_as_float(packed[j][1] << 16),
          rounded.y + __uint_as_float(packed[j][0] & 0xffff0000u) + __uint_as_float(packed[j][1] & 0xffff0000u));
    }
  }
  if constexpr (kGroups == 1) {
    ptx::stmatrix_x2(first_chunk, packed[0][0], packed[0][1]);
  } else {
#pragma unroll
    for (int j = 0; j < kGroups; j += 2) {
      ptx::stmatrix_x4(first_chunk ^ j * tile::kChunkBytes, packed[j][0], packed[j][1], packed[j + 1][0],
                       packed[j + 1][1]);
    }
  }
}

}  // namespace chiasma::sm90_sparse_fp8_direct
