// Compiled once per instruction set: Highway includes this file and the -inl.h files again for each of its targets.
#include "cpu/decode_kernels.h"

#include "cpu/kv_rows.h"

// The micro-kernels keep arrays of vectors in registers, which vectors without a compile-time size do not allow; Arm
// machines with SVE use NEON.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode_kernels.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep

// After foreach_target.h
#include "cpu/decode_matmul-inl.h"
#include "cpu/decode_softmax-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace chiasma::cpu::HWY_NAMESPACE {

void pack_queries(const QueryRows& rows, int heads, int dim, float* queries) {
  const int rope_begin = dim - kRopeDim;
  for (int head = 0; head < heads; head += kLanes) {
    // As in score_qk, a last panel with no more than kLanes heads is one vector wide.
    const int panel = head / kPanel * kPanel;
    const int width = panel + kLanes < heads ? kPanel : kLanes;
    float* column = queries + panel * dim + (head - panel);
    for (int lane = 0; lane < kLanes; ++lane) {
      if (head + lane >= heads) {
        for (int k = 0; k < dim; ++k) column[k * width + lane] = 0.0f;
        continue;
      }
      const bf16_t* q = rows.q + (head + lane) * rows.q_stride;
      const bf16_t* rope = rows.rope + (head + lane) * rows.rope_stride;
      for (int k = 0; k < rope_begin; ++k) column[k * width + lane] = to_float(q[k]);
      for (int k = 0; k < kRopeDim; ++k) column[(rope_begin + k) * width + lane] = to_float(rope[k]);
    }
  }
}

HWY_INLINE void load_bf16_vectors(const std::byte* bytes, int count, float* values) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<std::uint16_t, FloatTag> du16;
  const auto* from = reinterpret_cast<const std::uint16_t*>(bytes);
  for (int i = 0; i < count; i += kLanes) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from + i)));
    hn::Store(hn::BitCast(d, bits), d, values + i);
  }
}

HWY_INLINE bool any_nan_code(const std::byte* codes, int count) {
  const hn::CappedTag<std::uint8_t, 64> d;
  const auto magnitude = hn::Set(d, 0x7f);
  auto max = hn::Zero(d);
  for (int i = 0; i < count; i += static_cast<int>(hn::MaxLanes(d))) {
    max = hn::Max(max, hn::And(hn::LoadU(d, reinterpret_cast<const std::uint8_t*>(codes) + i), magnitude));
  }
  return !hn::AllFalse(d, hn::Eq(max, magnitude));
}

// An e4m3 code, moved to float16's exponent and mantissa, is the value times 2^-8, subnormals included; only NaN is not
// where float16 has it. The conversion is exact, so code * scale is rounded once.
template <int kTileDim>
HWY_INLINE void load_e4m3_tile(const std::byte* codes, float scale, float* values) {
  const FloatTag d;
  const hn::Rebind<hwy::float16_t, FloatTag> df16;
  const hn::Rebind<std::int16_t, FloatTag> di16;
  const hn::Rebind<std::uint8_t, FloatTag> du8;
  const auto mask = hn::Set(di16, static_cast<std::int16_t>(0xbf80));
  const FloatVec restore = hn::Set(d, 256.0f);
  const FloatVec factor = hn::Set(d, scale);
  const auto* from = reinterpret_cast<const std::uint8_t*>(codes);
  for (int i = 0; i < kTileDim; i += kLanes) {
    const auto code = hn::PromoteTo(di16, hn::LoadU(du8, from + i));
    const auto placed = hn::And(hn::ShiftRight<1>(hn::ShiftLeft<8>(code)), mask);
    const FloatVec value = hn::Mul(hn::PromoteTo(d, hn::BitCast(df16, placed)), restore);
    hn::Store(hn::Mul(value, factor), d, values + i);
  }
}

template <KvFormat kFormat>
HWY_INLINE void load_quantized_vectors(const RowBytes& bytes, float* values) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  if (any_nan_code(bytes.row, kTraits.code_columns)) return load_quantized(kFormat, bytes, values);
  for (int tile = 0; tile < kTraits.num_scales(); ++tile) {
    load_e4m3_tile<kTraits.scale_columns>(bytes.row + tile * kTraits.scale_columns,
                                          load_scale(kTraits.scale_type, bytes.scales, tile),
                                          values + tile * kTraits.scale_columns);
  }
}

template <KvFormat kFormat>
HWY_INLINE void dequantize_rows(const RowBytes* rows, int tokens, float* tile) {
  constexpr RowTraits kTraits = traits_of(kFormat);
  static_assert(kTraits.code_columns % kMaxLanes == 0 && kTraits.bf16_columns % kMaxLanes == 0);
  for (int t = 0; t < tokens; ++t, tile += kTileStride) {
    if constexpr (kTraits.is_quantized()) load_quantized_vectors<kFormat>(rows[t], tile);
    load_bf16_vectors(rows[t].row + kTraits.bf16_offset, kTraits.bf16_columns, tile + kTraits.code_columns);
  }
}

void dequantize_kv(KvFormat format, const RowBytes* rows, int tokens, float* tile) {
  switch (format) {
    case KvFormat::v32: return dequantize_rows<KvFormat::v32>(rows, tokens, tile);
    case KvFormat::v4: return dequantize_rows<KvFormat::v4>(rows, tokens, tile);
    case KvFormat::bf16: return dequantize_rows<KvFormat::bf16>(rows, tokens, tile);
    // Both lie in rows alike; scales are found by whoever located them.
    case KvFormat::v41:
    case KvFormat::v41plane: return dequantize_rows<KvFormat::v41>(rows, tokens, tile);
    case KvFormat::v32nope:
    case KvFormat::v32nope_compact: return dequantize_rows<KvFormat::v32nope>(rows, tokens, tile);
    case KvFormat::fp8: return dequantize_rows<KvFormat::fp8>(rows, tokens, tile);
    case KvFormat::fp8nope: return dequantize_rows<KvFormat::fp8nope>(rows, tokens, tile);
    case KvFormat::bf16nope: return dequantize_rows<KvFormat::bf16nope>(rows, tokens, tile);
  }
}

const char* kernel_target() {
  return hwy::TargetName(HWY_TARGET);
}

}  // namespace chiasma::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace chiasma::cpu {

HWY_EXPORT(pack_queries);
HWY_EXPORT(dequantize_kv);
HWY_EXPORT(score_qk);
HWY_EXPORT(softmax_step);
HWY_EXPORT(accumulate_pv);
HWY_EXPORT(merge_partials);
HWY_EXPORT(store_out);
HWY_EXPORT(kernel_target);

void pack_queries(const QueryRows& rows, int heads, int dim, float* queries) {
  HWY_DYNAMIC_DISPATCH(pack_queries)(rows, heads, dim, queries);
}
void dequantize_kv(KvFormat format, const RowBytes* rows, int tokens, float* tile) {
  HWY_DYNAMIC_DISPATCH(dequantize_kv)(format, rows, tokens, tile);
}
void score_qk(const float* queries, const float* tile, int tokens, int heads, int dim, float sm_scale, float* scores) {
  HWY_DYNAMIC_DISPATCH(score_qk)(queries, tile, tokens, heads, dim, sm_scale, scores);
}
void softmax_step(float* scores, int tokens, int heads, const Partial& state, float* rescale, float* probabilities) {
  HWY_DYNAMIC_DISPATCH(softmax_step)(scores, tokens, heads, state, rescale, probabilities);
}
void accumulate_pv(const float* probabilities, const float* tile, int tokens, int heads, const float* rescale,
                   int value_begin, int value_end, float* out) {
  HWY_DYNAMIC_DISPATCH(accumulate_pv)(probabilities, tile, tokens, heads, rescale, value_begin, value_end, out);
}
void merge_partials(const Partial& from, const Partial& into, int heads) {
  HWY_DYNAMIC_DISPATCH(merge_partials)(from, into, heads);
}
void store_out(const Partial& partial, int heads, const HeadOutputs& outputs) {
  HWY_DYNAMIC_DISPATCH(store_out)(partial, heads, outputs);
}
const char* kernel_target() {
  return HWY_DYNAMIC_DISPATCH(kernel_target)();
}

}  // namespace chiasma::cpu
#endif  // HWY_ONCE
