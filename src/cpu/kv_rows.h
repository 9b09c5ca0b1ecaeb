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
  const std::byte* scales;  // null for formats without; of formats with one for the whole cache: that one
};

inline RowBytes locate_row(KvFormat format, const KvPool& pool, std::int64_t slot) {
  const RowTraits traits = traits_of(format);
  const std::int64_t offset_in_page = slot % pool.page_size;
  const std::byte* page = pool.data + slot / pool.page_size * pool.page_stride_bytes;
  const std::byte* row = page + offset_in_page * traits.row_bytes;
  if (traits.scale_type == ScaleType::none) return {row, nullptr};
  if (traits.scale_type == ScaleType::cache) return {row, reinterpret_cast<const std::byte*>(&pool.scale)};
  const std::byte* scales =
      traits.has_scale_plane() ? page + plane_offset(format, pool.page_size, offset_in_page) : row;
  return {row, scales + traits.scales_offset};
}

inline std::uint8_t load_byte(const std::byte* bytes, int idx) {
  return std::to_integer<std::uint8_t>(bytes[idx]);
}

// Scale of one tile, exactly as stored.
inline float load_scale(ScaleType type, const std::byte* scales, int tile) {
  if (type == ScaleType::ue8m0) return ue8m0_to_float(load_byte(scales, tile));
  float scale = 0.0f;
  std::memcpy(&scale, scales + tile * static_cast<int>(sizeof(scale)), sizeof(scale));
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
  const RowTraits traits = traits_of(format);
  for (int tile = 0; tile < traits.num_scales(); ++tile) {
    const Real scale = static_cast<Real>(load_scale(traits.scale_type, bytes.scales, tile));
    for (int i = tile * traits.scale_columns; i < (tile + 1) * traits.scale_columns; ++i) {
      values[i] = static_cast<Real>(e4m3_to_float(load_byte(bytes.row, i))) * scale;
    }
  }
}

// One slot's key, [key_dim(format)], RoPE last. Its first kValueDim numbers are the slot's value vector.
template <typename Real>
void load_key(KvFormat format, const KvPool& pool, std::int64_t slot, Real* key) {
  const RowTraits traits = traits_of(format);
  const RowBytes bytes = locate_row(format, pool, slot);
  load_quantized(format, bytes, key);
  load_bf16(bytes.row + traits.bf16_offset, traits.bf16_columns, key + traits.code_columns);
}

}  // namespace chiasma::cpu
