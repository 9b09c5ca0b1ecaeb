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

enum class KvFormat : std::int32_t { v32 = 1, v4 = 2, bf16 = 3 };

// Width of the value (and output) vector; the same for every format.
inline constexpr int kValueDim = 512;
// The rotary part is stored as bf16 in every format.
inline constexpr int kRopeDim = 64;
// Largest finite e4m3 number, the quantisers' saturation point.
inline constexpr float kE4m3Max = 448.0f;
// Cache base pointers and page strides are multiples of this, so that a 16-byte access never straddles a row start.
inline constexpr int kCacheAlignment = 16;

// DeepSeek V3.2 and GLM-5: one self-contained row of 656 bytes per token.
//   [0, 512)    512 e4m3 codes; value = code * scale of its tile
//   [512, 528)  4 float32 scales, one per tile of 128 values
//   [528, 656)  64 bf16 RoPE values
namespace v32 {
inline constexpr int kNopeDim = 512;
inline constexpr int kKeyDim = kNopeDim + kRopeDim;
inline constexpr int kTileDim = 128;
inline constexpr int kNumTiles = kNopeDim / kTileDim;
inline constexpr int kCodesOffset = 0;
inline constexpr int kScalesOffset = kCodesOffset + kNopeDim;
inline constexpr int kScaleBytes = 4;
inline constexpr int kRopeOffset = kScalesOffset + kNumTiles * kScaleBytes;
inline constexpr int kRowBytes = kRopeOffset + kRopeDim * 2;
static_assert(kRowBytes == 656 && kKeyDim == 576);
}  // namespace v32

// DeepSeek V4.0: a page holds `page` rows of 576 bytes, then `page` scale groups of 8 bytes, then padding.
//   row    [0, 448)  448 e4m3 codes; [448, 576) 64 bf16 RoPE values
//   scales [0, 7)    7 ue8m0 scales, one per tile of 64 values; [7] padding
namespace v4 {
inline constexpr int kNopeDim = 448;
inline constexpr int kKeyDim = kNopeDim + kRopeDim;
inline constexpr int kTileDim = 64;
inline constexpr int kNumTiles = kNopeDim / kTileDim;
inline constexpr int kRopeOffset = kNopeDim;
inline constexpr int kRowBytes = kRopeOffset + kRopeDim * 2;
inline constexpr int kScaleGroupBytes = 8;
inline constexpr int kTokenBytes = kRowBytes + kScaleGroupBytes;
inline constexpr int kPageStrideMultiple = 576;
static_assert(kRowBytes == 576 && kTokenBytes == 584 && kNumTiles < kScaleGroupBytes);

CHIASMA_HOST_DEVICE constexpr std::int64_t scales_offset(int page_size, int offset_in_page) {
  return std::int64_t{page_size} * kRowBytes + std::int64_t{offset_in_page} * kScaleGroupBytes;
}
// Smallest page stride a writer uses for pages of `page_size` tokens.
CHIASMA_HOST_DEVICE constexpr std::int64_t padded_page_bytes(int page_size) {
  const std::int64_t bytes = std::int64_t{page_size} * kTokenBytes;
  return (bytes + kPageStrideMultiple - 1) / kPageStrideMultiple * kPageStrideMultiple;
}
}  // namespace v4

// Unquantised cache: 576 bf16 values, the first 512 of which are also the value vector.
namespace bf16kv {
inline constexpr int kKeyDim = 576;
inline constexpr int kRowBytes = kKeyDim * 2;
}  // namespace bf16kv

// Width of a query and key vector.
CHIASMA_HOST_DEVICE constexpr int key_dim(KvFormat format) {
  return format == KvFormat::v4 ? v4::kKeyDim : v32::kKeyDim;
}

// Distance in bytes between the rows of neighbouring tokens of one page.
CHIASMA_HOST_DEVICE constexpr int row_stride_bytes(KvFormat format) {
  switch (format) {
    case KvFormat::v32: return v32::kRowBytes;
    case KvFormat::v4: return v4::kRowBytes;
    case KvFormat::bf16: return bf16kv::kRowBytes;
  }
  return 0;
}

// Last extent of a cache tensor: bytes per token, or values per token for bf16.
CHIASMA_HOST_DEVICE constexpr int token_extent(KvFormat format) {
  switch (format) {
    case KvFormat::v32: return v32::kRowBytes;
    case KvFormat::v4: return v4::kTokenBytes;
    case KvFormat::bf16: return bf16kv::kKeyDim;
  }
  return 0;
}

// Smallest legal distance in bytes between two pages of `page_size` tokens.
CHIASMA_HOST_DEVICE constexpr std::int64_t min_page_bytes(KvFormat format, int page_size) {
  return format == KvFormat::v4 ? std::int64_t{page_size} * v4::kTokenBytes
                                : std::int64_t{page_size} * row_stride_bytes(format);
}

constexpr const char* format_name(KvFormat format) {
  switch (format) {
    case KvFormat::v32: return "v32";
    case KvFormat::v4: return "v4";
    case KvFormat::bf16: return "bf16";
  }
  return "unknown";
}

// How a quantiser chooses a tile's scale from its largest magnitude.
enum class ScaleMode : std::int32_t {
  pow2 = 1,  // 2^ceil(log2(max(amax / 448, 1e-4)))
  amax = 2,  // amax / 448
};

}  // namespace chiasma
