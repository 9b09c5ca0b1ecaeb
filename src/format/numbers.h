// Scalar conversions between the storage number formats and float32, bit-exact and dependency-free, for host and
// device. Kernels use faster vector routes of their own; tests hold those against these.
#pragma once

#include <bit>
#include <cstdint>

#include "format/kv_format.h"

namespace chiasma {

// A bf16 number as stored. Arithmetic happens in float32.
struct bf16_t {
  std::uint16_t bits;
  friend constexpr bool operator==(bf16_t, bf16_t) = default;
};
static_assert(sizeof(bf16_t) == 2);

CHIASMA_HOST_DEVICE constexpr float to_float(bf16_t value) {
  return std::bit_cast<float>(std::uint32_t{value.bits} << 16);
}

// Round to nearest even; NaN stays NaN (quiet, sign kept), overflow becomes infinity.
CHIASMA_HOST_DEVICE constexpr bf16_t to_bf16(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x0040u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// Devices differ in the NaN that arithmetic gives; results that are compared bit for bit have this one.
CHIASMA_HOST_DEVICE constexpr float with_one_nan(float value) {
  return value != value ? std::bit_cast<float>(0x7fc00000u) : value;
}

// e4m3 (the "fn" variant: no infinities, 0x7F and 0xFF are NaN, largest finite 448). Exact in float32.
CHIASMA_HOST_DEVICE constexpr float e4m3_to_float(std::uint8_t code) {
  const std::uint32_t sign = std::uint32_t{code & 0x80u} << 24;
  const std::uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return std::bit_cast<float>(sign | 0x7fc00000u);
  // Placing exponent and mantissa at float32's position leaves the exponent bias short by 120; the product
  // restores it and normalises e4m3 subnormals on the way.
  const float placed = std::bit_cast<float>(sign | (magnitude << 20));
  return placed * std::bit_cast<float>((127u + 120u) << 23);
}

// Round to nearest even, saturate finite values and infinities at +-448; NaN becomes 0x7F with its sign.
CHIASMA_HOST_DEVICE constexpr std::uint8_t float_to_e4m3(float value) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint8_t sign = static_cast<std::uint8_t>((bits >> 24) & 0x80u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= std::bit_cast<std::uint32_t>(464.0f)) return static_cast<std::uint8_t>(sign | 0x7eu);
  if (magnitude < std::bit_cast<std::uint32_t>(0.015625f)) {
    // Below 2^-6 codes are multiples of 2^-9. Adding 2^14 puts the last mantissa bit there, so that the float32
    // addition itself rounds to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 16384.0f;
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) & 0x0fu));
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const std::uint32_t code = (rounded - (120u << 23)) >> 20;
  return static_cast<std::uint8_t>(sign | (code > 0x7eu ? 0x7eu : code));
}

// ue8m0: a bare exponent, 2^(code - 127); 0xFF is NaN.
CHIASMA_HOST_DEVICE constexpr float ue8m0_to_float(std::uint8_t code) {
  if (code == 0xffu) return std::bit_cast<float>(0x7fc00000u);
  if (code == 0) return std::bit_cast<float>(0x00400000u);
  return std::bit_cast<float>(std::uint32_t{code} << 23);
}

}  // namespace chiasma
