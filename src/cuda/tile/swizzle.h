// Shared-memory tiles as the tensor cores want them: panels of 64 columns of 16-bit numbers, 128 bytes a row, with the
// eight 16-byte chunks of a row permuted by the row's number (the hardware's 128-byte swizzle).
#pragma once

#include <cstdint>

#include "format/kv_format.h"

namespace chiasma::tile {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = kPanelColumns * 2;
inline constexpr int kAtomRows = 8;  // rows after which the permutation repeats
inline constexpr int kAtomBytes = kAtomRows * kPanelRowBytes;
inline constexpr int kChunkBytes = 16;
inline constexpr int kChunkColumns = kChunkBytes / 2;

// Byte offset, within a panel that starts at a multiple of kAtomBytes, of a 16-byte chunk (0..7) of a row.
CHIASMA_HOST_DEVICE constexpr std::uint32_t chunk_offset(std::uint32_t row, std::uint32_t chunk) {
  return row * kPanelRowBytes + ((chunk ^ (row % kAtomRows)) * kChunkBytes);
}

// Matrix descriptor of PTX ISA, "Matrix Descriptor Format", for 128-byte swizzled tiles.
//   K-major (rows are M or N, columns the contraction): group_stride = bytes between 8-row groups; panel_stride unused.
//   MN-major (columns are N, rows the contraction): panel_stride = bytes between panels of 64 columns,
//   group_stride = bytes between groups of 8 rows.
CHIASMA_HOST_DEVICE constexpr std::uint64_t descriptor(std::uint32_t shared_address, std::uint32_t panel_stride,
                                                       std::uint32_t group_stride) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  return kSwizzle128 | (std::uint64_t{group_stride >> 4} << 32) | (std::uint64_t{panel_stride >> 4} << 16) |
         ((shared_address & 0x3ffffu) >> 4);
}

// The descriptor of what lies `units` of 16 bytes further. Only its lower word changes, which a compiler must be told.
CHIASMA_HOST_DEVICE constexpr std::uint64_t advance(std::uint64_t descriptor, std::uint32_t units) {
  const std::uint32_t low = static_cast<std::uint32_t>(descriptor) + units;
  return (descriptor >> 32 << 32) | low;
}

}  // namespace chiasma::tile
