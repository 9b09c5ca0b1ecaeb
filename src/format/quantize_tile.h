// The quantiser's arithmetic, one number at a time, for host and device: what every quantiser stores, bit for bit.
#pragma once

#include <bit>
#include <cstdint>

#include "format/kv_format.h"
#include "format/numbers.h"

namespace chiasma {

// Exponent of the pow2 scale of a tile that holds nothing larger than 1e-4 * 448: ceil(log2(1e-4)).
inline constexpr int kMinPow2Exponent = -13;
inline constexpr float kLeastNormal = 0x1p-126f;
inline constexpr std::uint8_t kE4m3Nan = 0x7f;

CHIASMA_HOST_DEVICE constexpr bool is_finite(float value) {
  return (std::bit_cast<std::uint32_t>(value) & 0x7fffffffu) < 0x7f800000u;
}

// The larger of amax and the number's magnitude, if that is finite.
CHIASMA_HOST_DEVICE constexpr float larger_finite(float amax, float value) {
  const float magnitude = std::bit_cast<float>(std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
  return is_finite(value) && magnitude > amax ? magnitude : amax;
}

// ceil(log2(max(amax / 448, 1e-4))) for a finite amax >= 0. In integers, because a float32 quotient or logarithm can
// round across a power of two: the answer is the smallest e with 448 * 2^e >= amax.
CHIASMA_HOST_DEVICE constexpr int pow2_scale_exponent(float amax) {
  constexpr std::uint32_t kMaxBits = std::bit_cast<std::uint32_t>(kE4m3Max);
  constexpr std::uint32_t kMantissaMask = 0x7fffffu;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(amax);
  const int exponent = static_cast<int>(bits >> 23) - static_cast<int>(kMaxBits >> 23);
  const int rounded = exponent + ((bits & kMantissaMask) > (kMaxBits & kMantissaMask) ? 1 : 0);
  return rounded > kMinPow2Exponent ? rounded : kMinPow2Exponent;
}

CHIASMA_HOST_DEVICE constexpr float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}

// amax: the tile's largest finite magnitude. In amax mode never below the smallest normal number: a zero or denormal
// scale would divide by zero, or be read as zero by hardware that flushes denormals.
CHIASMA_HOST_DEVICE constexpr float tile_scale(ScaleMode mode, float amax) {
  if (mode == ScaleMode::pow2) return power_of_two(pow2_scale_exponent(amax));
  const float scale = amax / kE4m3Max;
  return scale > kLeastNormal ? scale : kLeastNormal;
}

// The byte that stands for a scale that is a power of two.
CHIASMA_HOST_DEVICE constexpr std::uint8_t ue8m0_of(float scale) {
  return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scale) >> 23);
}

// A number's code. What is not finite becomes NaN and stays visible; in a tile of zeros of either sign all codes are 0.
// WHY a division and not a product with 1/scale: the reciprocal of an amax scale is rounded, which moves numbers that
// lie near the middle of two codes; for a power of two both are exact.
CHIASMA_HOST_DEVICE constexpr std::uint8_t quantize_number(float value, float scale, float amax) {
  if (!is_finite(value)) return kE4m3Nan;
  if (amax == 0.0f) return 0;
  return float_to_e4m3(value / scale);
}

struct TileScale {
  float scale;
  int num_nonfinite;  // NaN and infinities among the inputs
};

// Codes of a tile whose scale is given; returns how many of its numbers are not finite.
constexpr int quantize_with(const float* values, int count, float scale, std::uint8_t* codes) {
  float amax = 0.0f;
  int num_nonfinite = 0;
  for (int i = 0; i < count; ++i) {
    amax = larger_finite(amax, values[i]);
    num_nonfinite += is_finite(values[i]) ? 0 : 1;
  }
  for (int i = 0; i < count; ++i) codes[i] = quantize_number(values[i], scale, amax);
  return num_nonfinite;
}

// Chooses the scale from the finite numbers.
constexpr TileScale quantize_tile(const float* values, int count, ScaleMode mode, std::uint8_t* codes) {
  float amax = 0.0f;
  for (int i = 0; i < count; ++i) amax = larger_finite(amax, values[i]);
  const float scale = tile_scale(mode, amax);
  return {scale, quantize_with(values, count, scale, codes)};
}

}  // namespace chiasma
