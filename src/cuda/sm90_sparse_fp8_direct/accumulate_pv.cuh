// Stage accumulate_pv: output columns of one math warpgroup, [256 columns, heads], += V^T P, with V^T as the left
// operand from registers.
//
// LAYOUT: warp w of a group owns 64 consecutive columns, lane l eight of them, 8 (l / 4). Accumulator tile i has
// columns 2 i and 2 i + 1 of each eight as its rows l / 4 and l / 4 + 8, so a lane's results are eight neighbours.
#pragma once

#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90_sparse_fp8_direct/score_qk.cuh"

namespace chiasma::sm90_sparse_fp8_direct {

template <int kHeads>
using OutputTiles = ptx::Accumulator<kHeads>[kValueTiles];

inline constexpr int kPvSteps = kBlockTokens / 16;

// Eight codes, or bf16 values, of four tokens: 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of a contraction step, t = lane % 4.
template <typename Config>
struct RawValues {
  std::conditional_t<Config::kIsBf16, uint4, uint2> token[4];
};

__device__ __forceinline__ void load_shared(uint2& value, std::uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
}
__device__ __forceinline__ void load_shared(uint4& value, std::uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
}

// Where a lane's columns lie in the rows of a block.
template <typename Config>
struct ColumnReader {
  std::uint32_t address;  // shared, for the lane's token 2 t of the first step
  static constexpr int kValueBytes = Config::kIsBf16 ? 2 : 1;

  __device__ ColumnReader(const RowBlock<Config>& block, int group, int warp, int lane)
      : address(ptx::shared_address(&block.row[lane % 4 * 2]) +
                (group * kColumnsPerGroup + warp * kColumnsPerWarp + lane / 4 * kColumnsPerThread) * kValueBytes) {}

  __device__ void load(RawValues<Config>& raw, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = step * 16 + i / 2 * 8 + i % 2;
      load_shared(raw.token[i], address + token * Config::kPitch);
    }
  }
};

// Operand of tile i: columns 2 i, 2 i + 1 of two pairs of tokens, times the tokens' scales if there are any.
template <typename Config>
__device__ __forceinline__ void take_values(ptx::Fragment& fragment, const RawValues<Config>& raw, int tile,
                                            const std::uint32_t (&scales)[2]) {
  constexpr bool kHasScales = Config::kScaling != Scaling::none;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    if constexpr (Config::kIsBf16) {
      const auto word = [&](const uint4& of) { return tile == 0 ? of.x : tile == 1 ? of.y : tile == 2 ? of.z : of.w; };
      const std::uint32_t own = word(raw.token[2 * pair]), next = word(raw.token[2 * pair + 1]);
      fragment[2 * pair] = __byte_perm(own, next, 0x5410);
      fragment[2 * pair + 1] = __byte_perm(own, next, 0x7632);
      continue;
    } else {
      const uint2& first = raw.token[2 * pair];
      const uint2& second = raw.token[2 * pair + 1];
      const std::uint32_t interleaved =
          __byte_perm(tile < 2 ? first.x : first.y, tile < 2 ? second.x : second.y, tile % 2 == 0 ? 0x5140 : 0x7362);
      std::uint32_t even, odd;
      ptx::e4m3x4_to_half2x2(interleaved, even, odd);
      fragment[2 * pair] = kHasScales ? ptx::multiply_half2(even, scales[pair]) : even;
      fragment[2 * pair + 1] = kHasScales ? ptx::multiply_half2(odd, scales[pair]) : odd;
    }
  }
  ptx::fragment_pin(fragment);
}

// The same for columns that are bf16 values in the row: all tiles of a step, loaded where they are needed. factors: of
// the block's tokens. Rounded to f16.
template <typename Config>
__device__ __forceinline__ void take_bf16_values(ptx::Fragment (&fragments)[kValueTiles], const RowBlock<Config>& block,
                                                 const float (&factors)[kBlockTokens], int step, int lane) {
  const int first = step * 16 + lane % 4 * 2;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int token = first + pair * 8;
    const std::uint32_t offset = Config::kTraits.bf16_offset + lane / 4 * kColumnsPerThread * 2;
    const uint4 a = *reinterpret_cast<const uint4*>(block.row[token] + offset);
    const uint4 b = *reinterpret_cast<const uint4*>(block.row[token + 1] + offset);
    const float2 by = *reinterpret_cast<const float2*>(&factors[token]);
    const std::uint32_t words[kValueTiles][2] = {{a.x, b.x}, {a.y, b.y}, {a.z, b.z}, {a.w, b.w}};
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      const auto [own, other] = words[i];
      fragments[i][2 * pair] = ptx::pack_half2(__uint_as_float(own << 16) * by.x, __uint_as_float(other << 16) * by.y);
      fragments[i][2 * pair + 1] =
          ptx::pack_half2(__uint_as_float(own & 0xffff0000u) * by.x, __uint_as_float(other & 0xffff0000u) * by.y);
    }
  }
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) ptx::fragment_pin(fragments[i]);
}

__device__ __forceinline__ void value_pin(uint2& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y)::"memory");
}
__device__ __forceinline__ void value_pin(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)::"memory");
}

// Registers of accumulation, kept from one block to the next so that the tensor cores need not stop between them: what
// is loaded, and operands, of two steps in turns.
template <typename Config>
struct PvOperands {
  RawValues<Config> raw[2];
  ptx::Fragment fragments[2][kValueTiles];
};

// Issues the products of a block; when it returns, those of the last step are under way. probabilities: shared address
// of P. after_load(step): called when nothing will read the 16 rows of contraction step `step` any more.
// after_wait(step): called when no products are under way but those of step `step` - 1.
template <typename Config, typename AfterLoad, typename AfterWait>
__device__ __forceinline__ void accumulate_pv(OutputTiles<Config::kHeads>& output, PvOperands<Config>& operands,
                                              std::uint32_t probabilities, const RowBlock<Config>& block,
                                              const ValueScales<Config>& value_scales, int group, int warp, int lane,
                                              AfterLoad&& after_load, AfterWait&& after_wait) {
  constexpr bool kHasScales = Config::kScaling != Scaling::none;
  const ColumnReader<Config> reader(block, group, warp, lane);
  // Of one warp, in both groups' arithmetic the last.
  const bool is_bf16 = Config::kHasBf16Values && group == kMathGroups - 1 && warp == kWarpsPerWarpgroup - 1;
  const std::uint32_t* scale_pairs = nullptr;
  if constexpr (kHasScales) {
    // Where tiles are narrower than a warp's columns, lanes have different ones.
    constexpr int kScaleColumns = Config::kTraits.scale_columns;
    const int own_column = kScaleColumns < kColumnsPerWarp ? lane / 4 * kColumnsPerThread : 0;
    const int scale_tile = (group * kColumnsPerGroup + warp * kColumnsPerWarp + own_column) / kScaleColumns;
    scale_pairs = reinterpret_cast<const std::uint32_t*>(value_scales.code[is_bf16 ? 0 : scale_tile]) + lane % 4;
  }
  const std::uint64_t p = tile::descriptor(probabilities, 0, tile::kAtomBytes);
  constexpr int kStepUnits = 16 * tile::kPanelRowBytes / 16;

  reader.load(operands.raw[0], 0);
  reader.load(operands.raw[1], 1);
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) ptx::wgmma_pin(output[i]);
#pragma unroll
  for (int step = 0; step < kPvSteps; ++step) {
    RawValues<Config>& raw = operands.raw[step % 2];
    std::uint32_t scales[2] = {};
    if constexpr (kHasScales) {
      scales[0] = scale_pairs[step * 8];
      scales[1] = scale_pairs[step * 8 + 4];
    }
    // The products that read this set of operands last are done.
    ptx::wgmma_wait<1>();
    after_wait(step);
    if constexpr (Config::kHasBf16Values) {
      if (is_bf16) take_bf16_values<Config>(operands.fragments[step % 2], block, value_scales.bf16, step, lane);
    }
    if (!is_bf16) {
#pragma unroll
      for (auto& token : raw.token) value_pin(token);
#pragma unroll
      for (int i = 0; i < kValueTiles; ++i) take_values<Config>(operands.fragments[step % 2][i], raw, i, scales);
      if (step + 2 < kPvSteps) reader.load(raw, step + 2);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kValueTiles; ++i) {
      ptx::wgmma_register_a<Config::kIsBf16 ? ptx::Operand::bf16 : ptx::Operand::f16, ptx::RightLayout::mn_major>(
          output[i], operands.fragments[step % 2][i], tile::advance(p, step * kStepUnits), true);
    }
    ptx::wgmma_commit();
    // The rows are in registers as operands, and all lanes of the warp are past that here.
    after_load(step);
  }
}

template <typename Config>
__device__ __forceinline__ void finish_pv(OutputTiles<Config::kHeads>& output) {
  ptx::wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kValueTiles; ++i) ptx::wgmma_pin(output[i]);
}

}  // namespace chiasma::sm90_sparse_fp8_direct
