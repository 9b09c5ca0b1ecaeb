// Softmax, merge and output of the decode. Included once per instruction set by decode_kernels.cpp.
//
// Special values follow float64 softmax: a NaN or +infinite score makes its head's row NaN; a score of -infinity has
// probability 0; a row whose every score is -infinity is NaN.
#if defined(CHIASMA_CPU_DECODE_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef CHIASMA_CPU_DECODE_SOFTMAX_INL_H_
#undef CHIASMA_CPU_DECODE_SOFTMAX_INL_H_
#else
#define CHIASMA_CPU_DECODE_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/decode_kernels.h"
#include "cpu/decode_matmul-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chiasma::cpu::HWY_NAMESPACE {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87.3, where float32 turns subnormal. NaN stays NaN, which
// is why Highway's own Exp does not serve: it gives 0.
HWY_INLINE FloatVec exp_nonpositive(FloatVec x) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low mantissa bits.
  const FloatVec rounder = hn::Set(d, 12582912.0f);
  const FloatVec shifted = hn::MulAdd(x, hn::Set(d, 1.44269504f), rounder);
  const FloatVec n = hn::Sub(shifted, rounder);
  // ln 2 in two parts; the first has trailing zeros, so that its product with n is exact.
  FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6f), r);
  // 1 + r + r^2 P(r), P of degree 4 with its largest relative error over |r| <= ln 2 / 2 made least (4.4e-9).
  FloatVec p = hn::MulAdd(r, hn::Set(d, 0.00138144672f), hn::Set(d, 0.00836878084f));
  p = hn::MulAdd(r, p, hn::Set(d, 0.0416683927f));
  p = hn::MulAdd(r, p, hn::Set(d, 0.166665196f));
  p = hn::MulAdd(r, p, hn::Set(d, 0.49999994f));
  p = hn::MulAdd(hn::Mul(r, r), p, r);
  p = hn::Add(p, hn::Set(d, 1.0f));
  const auto exponent = hn::Add(hn::ShiftLeft<23>(hn::BitCast(du, shifted)), hn::Set(du, 127u << 23));
  const FloatVec y = hn::Mul(p, hn::BitCast(d, exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), y);
}

// What scores are subtracted from: a maximum of -infinity must not turn -infinity - max into NaN.
HWY_INLINE FloatVec finite_reference(FloatVec max) {
  const FloatTag d;
  return hn::IfThenZeroElse(hn::Eq(max, hn::Set(d, kMinusInfinity)), max);
}

HWY_INLINE void pack_probabilities(const float* HWY_RESTRICT scores, int tokens, int heads,
                                   float* HWY_RESTRICT probabilities) {
  for (int head = 0; head < heads;) {
    const int rows = next_tile_rows(heads - head);
    float* group = probabilities + head * tokens;
    for (int t = 0; t < tokens; ++t) {
      const float* from = scores + t * kScoreStride + head;
      if (rows == kTileRows) {
        std::memcpy(group + t * kTileRows, from, sizeof(float) * kTileRows);
      } else {
        std::copy_n(from, rows, group + t * rows);
      }
    }
    head += rows;
  }
}

void softmax_step(float* scores, int tokens, int heads, const Partial& state, float* rescale, float* probabilities) {
  const FloatTag d;
  for (int head = 0; head < heads; head += kLanes) {
    float* column = scores + head;
    const FloatVec old_max = hn::Load(d, state.max + head);
    FloatVec max = old_max;
    for (int t = 0; t < tokens; ++t) max = hn::Max(max, hn::Load(d, column + t * kScoreStride));

    const FloatVec reference = finite_reference(max);
    FloatVec sum = hn::Zero(d);
    for (int t = 0; t < tokens; ++t) {
      float* score = column + t * kScoreStride;
      const FloatVec p = exp_nonpositive(hn::Sub(hn::Load(d, score), reference));
      sum = hn::Add(sum, p);
      hn::Store(p, d, score);
    }
    const FloatVec factor = exp_nonpositive(hn::Sub(old_max, reference));
    hn::Store(factor, d, rescale + head);
    hn::Store(hn::MulAdd(hn::Load(d, state.sum + head), factor, sum), d, state.sum + head);
    hn::Store(max, d, state.max + head);
  }
  pack_probabilities(scores, tokens, heads, probabilities);
}

HWY_INLINE void copy_partial(const Partial& from, const Partial& into, int heads) {
  std::copy_n(from.out, kValueDim * heads, into.out);
  std::copy_n(from.max, kHeadGroup, into.max);
  std::copy_n(from.sum, kHeadGroup, into.sum);
}

// Updates max and sum and gives the factors that bring both parts to the new max.
HWY_INLINE void merge_states(const Partial& from, const Partial& into, float* from_factor, float* into_factor) {
  const FloatTag d;
  for (int head = 0; head < kHeadGroup; head += kLanes) {
    const FloatVec from_max = hn::Load(d, from.max + head);
    const FloatVec into_max = hn::Load(d, into.max + head);
    const FloatVec max = hn::Max(from_max, into_max);
    const FloatVec reference = finite_reference(max);
    const FloatVec a = exp_nonpositive(hn::Sub(from_max, reference));
    const FloatVec b = exp_nonpositive(hn::Sub(into_max, reference));
    const FloatVec added = hn::Mul(hn::Load(d, from.sum + head), a);
    hn::Store(hn::MulAdd(hn::Load(d, into.sum + head), b, added), d, into.sum + head);
    hn::Store(max, d, into.max + head);
    hn::Store(a, d, from_factor + head);
    hn::Store(b, d, into_factor + head);
  }
}

void merge_partials(const Partial& from, const Partial& into, int heads) {
  if (*from.tokens == 0) return;
  const bool was_empty = *into.tokens == 0;
  *into.tokens += *from.tokens;
  if (was_empty) return copy_partial(from, into, heads);

  const FloatTag d;
  HWY_ALIGN float from_factor[kHeadGroup];
  HWY_ALIGN float into_factor[kHeadGroup];
  merge_states(from, into, from_factor, into_factor);
  for (int value = 0; value < kValueDim; value += kPanel) {
    for (int head = 0; head < heads; ++head) {
      const int offset = value * heads + head * kPanel;
      const FloatVec a = hn::Set(d, from_factor[head]);
      const FloatVec b = hn::Set(d, into_factor[head]);
      for (int i = offset; i < offset + kPanel; i += kLanes) {
        const FloatVec added = hn::Mul(hn::Load(d, from.out + i), a);
        hn::Store(hn::MulAdd(hn::Load(d, into.out + i), b, added), d, into.out + i);
      }
    }
  }
}

// Rounds to nearest even, as to_bf16() does.
HWY_INLINE void store_bf16(FloatVec value, bf16_t* to) {
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::RebindToSigned<FloatTag> di;
  const hn::Rebind<std::uint16_t, FloatTag> du16;
  const auto bits = hn::BitCast(du, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(du, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du, 0x7fffu))));
  const auto quiet = hn::Or(upper, hn::Set(du, 0x0040u));
  const auto chosen = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(value)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, chosen)), du16, reinterpret_cast<std::uint16_t*>(to));
}

// What a head's sums are multiplied by, and its lse.
struct HeadScale {
  float factor, lse;
};
inline HeadScale finish_head(float max, float sum, const float* sink) {
  const double lse = max == kMinusInfinity ? std::numeric_limits<double>::quiet_NaN()
                                           : static_cast<double>(max) + std::log(static_cast<double>(sum));
  // exp(lse) / (exp(lse) + exp(sink)), divided through by exp(lse), so that neither overflows.
  const double kept = sink == nullptr ? 1.0 : 1.0 / (1.0 + std::exp(static_cast<double>(*sink) - lse));
  return {static_cast<float>(kept / static_cast<double>(sum)), static_cast<float>(lse)};
}

void store_out(const Partial& partial, int heads, const HeadOutputs& outputs) {
  const FloatTag d;
  for (int head = 0; head < heads; ++head) {
    bf16_t* out = outputs.out + head * outputs.out_stride;
    float* lse = outputs.lse + head * outputs.lse_stride;
    if (*partial.tokens == 0) {
      std::fill_n(out, kValueDim, bf16_t{0});
      *lse = kMinusInfinity;
      continue;
    }
    const float* sink = outputs.sink == nullptr ? nullptr : outputs.sink + head * outputs.sink_stride;
    const HeadScale scale = finish_head(partial.max[head], partial.sum[head], sink);
    *lse = scale.lse;
    const FloatVec factor = hn::Set(d, scale.factor);
    for (int value = 0; value < kValueDim; value += kPanel) {
      const float* sums = partial.out + value * heads + head * kPanel;
      for (int i = 0; i < kPanel; i += kLanes) store_bf16(hn::Mul(hn::Load(d, sums + i), factor), out + value + i);
    }
  }
}

}  // namespace chiasma::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
