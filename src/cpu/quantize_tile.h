// The quantiser's arithmetic: one tile of float32 values to e4m3 codes and a scale.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "format/kv_format.h"
#include "format/numbers.h"

namespace chiasma::cpu {

// Exponent of the pow2 scale of a tile that holds nothing larger than 1e-4 * 448: ceil(log2(1e-4)).
inline constexpr int kMinPow2Exponent = -13;

// ceil(log2(max(amax / 448, 1e-4))) for a finite amax >= 0. In integers, because a float32 quotient or logarithm can
// round across a power of two: the answer is the smallest e with 448 * 2^e >= amax.
constexpr int pow2_scale_exponent(float amax) {
  constexpr std::uint32_t kMaxBits = std::bit_cast<std::uint32_t>(kE4m3Max);
  constexpr std::uint32_t kMantissaMask = 0x7fffffu;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(amax);
  const int exponent = static_cast<int>(bits >> 23) - static_cast<int>(kMaxBits >> 23);
  const int round_up = (bits & kMantissaMask) > (kMaxBits & kMantissaMask) ? 1 : 0;
  return std::max(exponent + round_up, kMinPow2Exponent);
}

constexpr float pow2_scale(float amax) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(pow2_scale_exponent(amax) + 127) << 23);
}

// amax / 448 in float32, but never below the smallest normal number: a zero or denormal scale would divide by zero, or
// be read as zero by hardware that flushes denormals.
constexpr float amax_scale(float amax) {
  return std::max(amax / kE4m3Max, std::numeric_limits<float>::min());
}

struct TileScale {
  float scale;
  int num_nonfinite;  // NaN and infinities among the inputs
};

// Chooses the scale from the finite values and writes codes[count]. Infinities saturate, NaN becomes the NaN code of
// its sign. WHY a division and not a product with 1/scale: the reciprocal of an amax scale is rounded, which moves
// values that lie near the middle of two codes; for a power of two both are exact.
inline TileScale quantize_tile(const float* values, int count, ScaleMode mode, std::uint8_t* codes) {
  constexpr std::int32_t kMagnitudeMask = 0x7fffffff;
  constexpr std::int32_t kInfinityBits = 0x7f800000;
  std::int32_t amax_bits = 0;  // magnitudes of floats order as their bits do
  int num_nonfinite = 0;
  for (int i = 0; i < count; ++i) {
    const std::int32_t magnitude = std::bit_cast<std::int32_t>(values[i]) & kMagnitudeMask;
    const std::int32_t finite = magnitude < kInfinityBits ? magnitude : 0;
    num_nonfinite += magnitude >= kInfinityBits ? 1 : 0;
    amax_bits = amax_bits > finite ? amax_bits : finite;
  }
  const float amax = std::bit_cast<float>(amax_bits);
  const float scale = mode == ScaleMode::pow2 ? pow2_scale(amax) : amax_scale(amax);
  for (int i = 0; i < count; ++i) codes[i] = float_to_e4m3(values[i] / scale);
  return {scale, num_nonfinite};
}

}  // namespace chiasma::cpu
