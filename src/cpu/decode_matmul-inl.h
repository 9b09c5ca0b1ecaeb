// The two matrix products of the decode, score_qk and accumulate_pv, on one register-tiled micro-kernel. Included once
// per instruction set by decode_kernels.cpp.
#if defined(CHIASMA_CPU_DECODE_MATMUL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHIASMA_CPU_DECODE_MATMUL_INL_H_
#undef CHIASMA_CPU_DECODE_MATMUL_INL_H_
#else
#define CHIASMA_CPU_DECODE_MATMUL_INL_H_
#endif

#include <algorithm>

#include "cpu/decode_kernels.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chiasma::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, kMaxLanes>;
using FloatVec = hn::Vec<FloatTag>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));

// PERF: 6 rows x 2 vectors of sums, 2 vectors of the panel and one broadcast fill the 16 registers of AVX2, and need 8
// loads for 12 multiply-adds.
inline constexpr int kTileRows = 6;
inline constexpr int kTileVecs = 2;
inline constexpr int kPanel = kTileVecs * kLanes;
static_assert(kValueChunk % kPanel == 0 && kHeadGroup % kLanes == 0);

// Rows that the next tile takes when `remaining` are left: at most 6, shared out evenly, as a tile of few rows leaves
// the multiply-add units waiting for their own results.
HWY_INLINE int next_tile_rows(int remaining) {
  const int num_tiles = (remaining + kTileRows - 1) / kTileRows;
  return (remaining + num_tiles - 1) / num_tiles;
}

// sums[r][v] = sum over k < depth of rows[r * kRowStride + k * kRowStep] * panel[k * kPanelStep + v * kLanes + lane]
template <int kRows, int kVecs, int kRowStride, int kRowStep, int kPanelStep>
HWY_INLINE void multiply_tile(const float* HWY_RESTRICT rows, const float* HWY_RESTRICT panel, int depth,
                              FloatVec (&sums)[kRows][kVecs]) {
  const FloatTag d;
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(2)
    for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::Zero(d);
  }
  for (int k = 0; k < depth; ++k) {
    FloatVec column[kVecs];
    HWY_UNROLL(2)
    for (int v = 0; v < kVecs; ++v) column[v] = hn::Load(d, panel + v * kLanes);
    HWY_UNROLL(8)
    for (int r = 0; r < kRows; ++r) {
      const FloatVec factor = hn::Set(d, rows[r * kRowStride]);
      HWY_UNROLL(2)
      for (int v = 0; v < kVecs; ++v) sums[r][v] = hn::MulAdd(factor, column[v], sums[r][v]);
    }
    rows += kRowStep;
    panel += kPanelStep;
  }
}

// Which part of the key dimension a score tile adds up.
struct DepthRange {
  int size;
  bool first, last;
  float sm_scale;
};

template <int kRows, int kVecs>
HWY_NOINLINE void score_tile(const float* keys, const float* queries, const DepthRange& depth, float* scores) {
  const FloatTag d;
  FloatVec sums[kRows][kVecs];
  multiply_tile<kRows, kVecs, kTileStride, 1, kVecs * kLanes>(keys, queries, depth.size, sums);
  const FloatVec scale = hn::Set(d, depth.sm_scale);
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(2)
    for (int v = 0; v < kVecs; ++v) {
      float* score = scores + r * kScoreStride + v * kLanes;
      FloatVec sum = sums[r][v];
      if (!depth.first) sum = hn::Add(sum, hn::Load(d, score));
      if (depth.last) sum = hn::Mul(sum, scale);
      hn::Store(sum, d, score);
    }
  }
}

template <int kVecs>
HWY_INLINE void score_rows(int rows, const float* keys, const float* queries, const DepthRange& depth, float* scores) {
  switch (rows) {
    case 6: return score_tile<6, kVecs>(keys, queries, depth, scores);
    case 5: return score_tile<5, kVecs>(keys, queries, depth, scores);
    case 4: return score_tile<4, kVecs>(keys, queries, depth, scores);
    case 3: return score_tile<3, kVecs>(keys, queries, depth, scores);
    case 2: return score_tile<2, kVecs>(keys, queries, depth, scores);
    default: return score_tile<1, kVecs>(keys, queries, depth, scores);
  }
}

// One panel of heads against all tokens. PERF: the key dimension goes in two halves, so that half a panel of queries
// (18 KB with AVX2) stays in the L1 cache while the tile's rows stream past.
template <int kVecs>
HWY_INLINE void score_panel(const float* queries, const float* tile, int tokens, int dim, float sm_scale,
                            float* scores) {
  const int half = dim / 2;
  for (int begin = 0; begin < dim; begin += half) {
    const DepthRange depth = {half, begin == 0, begin + half == dim, sm_scale};
    for (int token = 0; token < tokens;) {
      const int rows = next_tile_rows(tokens - token);
      score_rows<kVecs>(rows, tile + token * kTileStride + begin, queries + begin * kVecs * kLanes, depth,
                        scores + token * kScoreStride);
      token += rows;
    }
  }
}

void score_qk(const float* queries, const float* tile, int tokens, int heads, int dim, float sm_scale, float* scores) {
  int head = 0;
  for (; head + kLanes < heads; head += kPanel) {
    score_panel<kTileVecs>(queries + head * dim, tile, tokens, dim, sm_scale, scores + head);
  }
  if (head < heads) score_panel<1>(queries + head * dim, tile, tokens, dim, sm_scale, scores + head);
}

// out [kRows, kPanel]
template <int kRows>
HWY_NOINLINE void accumulate_tile(const float* probabilities, const float* values, int tokens, const float* rescale,
                                  float* out) {
  const FloatTag d;
  FloatVec sums[kRows][kTileVecs];
  multiply_tile<kRows, kTileVecs, 1, kRows, kTileStride>(probabilities, values, tokens, sums);
  HWY_UNROLL(8)
  for (int r = 0; r < kRows; ++r) {
    HWY_UNROLL(2)
    for (int v = 0; v < kTileVecs; ++v) {
      float* sum = out + r * kPanel + v * kLanes;
      if (rescale != nullptr) sums[r][v] = hn::MulAdd(hn::Load(d, sum), hn::Set(d, rescale[r]), sums[r][v]);
      hn::Store(sums[r][v], d, sum);
    }
  }
}

HWY_INLINE void accumulate_rows(int rows, const float* probabilities, const float* values, int tokens,
                                const float* rescale, float* out) {
  switch (rows) {
    case 6: return accumulate_tile<6>(probabilities, values, tokens, rescale, out);
    case 5: return accumulate_tile<5>(probabilities, values, tokens, rescale, out);
    case 4: return accumulate_tile<4>(probabilities, values, tokens, rescale, out);
    case 3: return accumulate_tile<3>(probabilities, values, tokens, rescale, out);
    case 2: return accumulate_tile<2>(probabilities, values, tokens, rescale, out);
    default: return accumulate_tile<1>(probabilities, values, tokens, rescale, out);
  }
}

void accumulate_pv(const float* probabilities, const float* tile, int tokens, int heads, const float* rescale,
                   int value_begin, int value_end, float* out) {
  for (int value = value_begin; value < value_end; value += kPanel) {
    for (int head = 0; head < heads;) {
      const int rows = next_tile_rows(heads - head);
      accumulate_rows(rows, probabilities + head * tokens, tile + value, tokens,
                      rescale == nullptr ? nullptr : rescale + head, out + value * heads + head * kPanel);
      head += rows;
    }
  }
}

}  // namespace chiasma::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
