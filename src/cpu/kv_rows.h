// What a stored row means: finds the bytes of a slot and turns them into numbers. Plain scalar code, shared by the
// oracle and the cache operations; the fast decode has a vector route of its own that tests hold against the oracle.
#pragma once

#include <cstdint>
#include <cstring>

#include "api/problem.h"

namespace chiasma::cpu {

// First byte of a slot's row, and of its scales. 0 <= slot < pool.num_slots().
struct RowBytes {
  const std::byte* row;
  const std::byte* scales;  // null for bf16, which has none
};

inline RowBytes locate_row(KvFormat format, const KvPool& pool, std::int64_t slot) {
  const std::int64_t offset_in_page = slot % pool.page_size;
  const std::byte* page = pool.data + slot / pool.page_size * pool.page_stride_bytes;
  const std::byte* row = page + offset_in_page * row_stride_bytes(format);
  switch (format) {
    case KvFormat::v32: return {row, row + v32::kScalesOffset};
    case KvFormat::v4:
      return {row, page + v4::scales_offset(static_cast<int>(pool.page_size), static_cast<int>(offset_in_page))};
    case KvFormat::bf16: break;
  }
  return {row, nullptr};
}

inline std::uint8_t load_byte(const std::byte* bytes, int idx) {
  return std::to_integer<std::uint8_t>(bytes[idx]);
}

// Scale of one tile, exactly as stored.
inline float load_scale(KvFormat format, const std::byte* scales, int tile) {
  if (format == KvFormat::v4) return ue8m0_to_float(load_byte(scales, tile));
  float scale = 0.0f;
  std::memcpy(&scale, scales + tile * v32::kScaleBytes, sizeof(scale));
  return scale;
}

// bf16 values to Real.
template <typename Real>
void load_bf16(const std::byte* bytes, int count, Real* values) {
  for (int i = 0; i < count; ++i) {
    bf16_t value{};
    std::memcpy(&value, bytes + i * static_cast<int>(sizeof(value)), sizeof(value));
    values[i] = static_cast<Real>(to_float(value));
  }
}

// The e4m3 part of a row: Real(code) * Real(scale of its tile). Exact for double (4 + 24 significant bits), rounded
// once for float.
template <typename Real>
void load_quantized(KvFormat format, const RowBytes& bytes, Real* values) {
  const int num_tiles = format == KvFormat::v4 ? v4::kNumTiles : v32::kNumTiles;
  const int tile_dim = format == KvFormat::v4 ? v4::kTileDim : v32::kTileDim;
  for (int tile = 0; tile < num_tiles; ++tile) {
    const Real scale = static_cast<Real>(load_scale(format, bytes.scales, tile));
    for (int i = tile * tile_dim; i < (tile + 1) * tile_dim; ++i) {
      values[i] = static_cast<Real>(e4m3_to_float(load_byte(bytes.row, i))) * scale;
    }
  }
}

// One slot's key, [key_dim(format)], RoPE last. Its first kValueDim numbers are the slot's value vector.
template <typename Real>
void load_key(KvFormat format, const KvPool& pool, std::int64_t slot, Real* key) {
  const RowBytes bytes = locate_row(format, pool, slot);
  switch (format) {
    case KvFormat::v32:
      load_quantized(format, bytes, key);
      load_bf16(bytes.row + v32::kRopeOffset, kRopeDim, key + v32::kNopeDim);
      return;
    case KvFormat::v4:
      load_quantized(format, bytes, key);
      load_bf16(bytes.row + v4::kRopeOffset, kRopeDim, key + v4::kNopeDim);
      return;
    case KvFormat::bf16: load_bf16(bytes.row, bf16kv::kKeyDim, key); return;
  }
}

}  // namespace chiasma::cpu
