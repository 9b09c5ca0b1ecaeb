// The byte layout of every KV cache format. No other file knows an offset: kernels, quantisers, the oracle and the
// tests all ask this one. Usable on host and device; explained with pictures in docs/kv_format.md.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CHIASMA_HOST_DEVICE __host__ __device__
#else
#define CHIASMA_HOST_DEVICE
#endif

namespace chiasma {

enum class KvFormat : std::int32_t {
  v32 = 1,
  v4 = 2,
  bf16 = 3,
  v41 = 4,
  v41plane = 5,
  v32nope = 6,
  v32nope_compact = 7,
  fp8 = 8,
  fp8nope = 9,
  bf16nope = 10,
};
inline constexpr KvFormat kAllFormats[] = {
    KvFormat::v32,
    KvFormat::v4,
    KvFormat::bf16,
    KvFormat::v41,
    KvFormat::v41plane,
    KvFormat::v32nope,
    KvFormat::v32nope_compact,
    KvFormat::fp8,
    KvFormat::fp8nope,
    KvFormat::bf16nope,
};

// Width of the value (and output) vector; the same for every format.
inline constexpr int kValueDim = 512;
// Rotary columns of a query and a key, the last ones, where a format has any.
inline constexpr int kRopeDim = 64;
// Largest finite e4m3 number, the quantisers' saturation point.
inline constexpr float kE4m3Max = 448.0f;
// Cache base pointers and page strides are multiples of this, so that a 16-byte access never straddles a row start.
inline constexpr int kCacheAlignment = 16;

enum class ScaleType {
  none,     // bf16 formats
  float32,  // with the row
  ue8m0,    // bare exponents, with the row or in the page's scale plane
  cache,    // one float32 for the whole cache, which comes with the call
};

// A format's layout. A key is `code_columns` e4m3 numbers, which begin the row, each times its scale, and then
// `bf16_columns` numbers as they are; its first kValueDim columns are the value.
struct RowTraits {
  const char* name;
  int code_columns;
  ScaleType scale_type;
  int scale_columns;  // columns that share a scale; 0: no scales
  int bf16_columns;
  bool has_rope;          // whether the last kRopeDim columns are rotary
  bool has_second_cache;  // whether models with this format attend to two caches at once
  int bf16_offset;        // in the row
  int scales_offset;      // in the row, or in the token's group of the scale plane
  int row_bytes;          // from the row of a token to that of the next
  int plane_group_bytes;  // of a token in the scale plane, which lies behind the page's rows; 0: scales are in the row
  int page_bytes_multiple;  // to which writers round a page's bytes up

  CHIASMA_HOST_DEVICE constexpr int key_dim() const { return code_columns + bf16_columns; }
  CHIASMA_HOST_DEVICE constexpr int num_scales() const { return scale_columns == 0 ? 0 : code_columns / scale_columns; }
  CHIASMA_HOST_DEVICE constexpr bool is_quantized() const { return code_columns > 0; }
  CHIASMA_HOST_DEVICE constexpr bool has_scale_plane() const { return plane_group_bytes > 0; }
  CHIASMA_HOST_DEVICE constexpr int token_bytes() const { return row_bytes + plane_group_bytes; }
};

// clang-format off
CHIASMA_HOST_DEVICE constexpr RowTraits traits_of(KvFormat format) {
  using enum ScaleType;
  switch (format) {
    //                                                                                        offsets       bytes
    //                                      codes scale    /scale bf16 rope   second   bf16  scales   row group page
    // DeepSeek V3.2, GLM-5.
    case KvFormat::v32:             return {"v32", 512, float32, 128, 64, true, false, 528, 512, 656, 0, 16};
    // DeepSeek V4.0: 7 scales and a byte of padding a token in the scale plane.
    case KvFormat::v4:              return {"v4", 448, ue8m0, 64, 64, true, true, 448, 0, 576, 8, 576};
    case KvFormat::bf16:            return {"bf16", 0, none, 0, 576, true, false, 0, 0, 1152, 0, 16};
    // DeepSeek V4.1: the rotary columns are quantised, too.
    case KvFormat::v41:             return {"v41", 512, ue8m0, 32, 0, true, true, 0, 512, 528, 0, 528};
    case KvFormat::v41plane:        return {"v41plane", 512, ue8m0, 32, 0, true, true, 0, 0, 512, 16, 512};
    // GLM-5.3-Flash: no rotary columns; in v32's rows, whose last 128 bytes are then never read, or without those.
    case KvFormat::v32nope:         return {"v32nope", 512, float32, 128, 0, false, false, 0, 512, 656, 0, 16};
    case KvFormat::v32nope_compact: return {"v32nope_compact", 512, float32, 128, 0, false, false, 0, 512, 528, 0, 16};
    // Engines' plain fp8 cache.
    case KvFormat::fp8:             return {"fp8", 576, cache, 576, 0, true, false, 0, 0, 576, 0, 16};
    case KvFormat::fp8nope:         return {"fp8nope", 512, cache, 512, 0, false, false, 0, 0, 512, 0, 16};
    case KvFormat::bf16nope:        return {"bf16nope", 0, none, 0, 512, false, false, 0, 0, 1024, 0, 16};
  }
  return {"unknown", 0, none, 0, 0, false, false, 0, 0, 0, 0, 1};
}
// clang-format on

// Width of a query and key vector.
CHIASMA_HOST_DEVICE constexpr int key_dim(KvFormat format) {
  return traits_of(format).key_dim();
}
inline constexpr int kMaxKeyDim = 576;

// Distance in bytes between the rows of neighbouring tokens of one page.
CHIASMA_HOST_DEVICE constexpr int row_stride_bytes(KvFormat format) {
  return traits_of(format).row_bytes;
}

// Last extent of a cache tensor: bytes per token, or values per token for bf16 formats.
CHIASMA_HOST_DEVICE constexpr int token_extent(KvFormat format) {
  const RowTraits traits = traits_of(format);
  return traits.is_quantized() ? traits.token_bytes() : traits.key_dim();
}

// Smallest legal distance in bytes between two pages of `page_size` tokens.
CHIASMA_HOST_DEVICE constexpr std::int64_t min_page_bytes(KvFormat format, int page_size) {
  return std::int64_t{page_size} * traits_of(format).token_bytes();
}

// The distance that the format's writers use.
CHIASMA_HOST_DEVICE constexpr std::int64_t padded_page_bytes(KvFormat format, int page_size) {
  const std::int64_t multiple = traits_of(format).page_bytes_multiple;
  return (min_page_bytes(format, page_size) + multiple - 1) / multiple * multiple;
}

// Where a token's group of a page's scale plane begins, in bytes from the page.
CHIASMA_HOST_DEVICE constexpr std::int64_t plane_offset(KvFormat format, std::int64_t page_size,
                                                        std::int64_t offset_in_page) {
  const RowTraits traits = traits_of(format);
  return page_size * traits.row_bytes + offset_in_page * traits.plane_group_bytes;
}

constexpr const char* format_name(KvFormat format) {
  return traits_of(format).name;
}

// v32 by name, for kernels that read nothing else.
namespace v32 {
inline constexpr RowTraits kTraits = traits_of(KvFormat::v32);
inline constexpr int kNopeDim = kTraits.code_columns;
inline constexpr int kKeyDim = kTraits.key_dim();
inline constexpr int kTileDim = kTraits.scale_columns;
inline constexpr int kNumTiles = kTraits.num_scales();
inline constexpr int kCodesOffset = 0;
inline constexpr int kScalesOffset = kTraits.scales_offset;
inline constexpr int kScaleBytes = 4;
inline constexpr int kRopeOffset = kTraits.bf16_offset;
inline constexpr int kRowBytes = kTraits.row_bytes;
}  // namespace v32

// How a quantiser chooses a tile's scale from its largest magnitude.
enum class ScaleMode : std::int32_t {
  pow2 = 1,  // 2^ceil(log2(max(amax / 448, 1e-4)))
  amax = 2,  // amax / 448
};

}  // namespace chiasma
