// number / scale for all numbers of a tile, without a division for each. For host and device, so that a test can try
// every bf16 number with every scale that a tile of bf16 numbers can have.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "format/kv_format.h"

namespace chiasma::gpu {

CHIASMA_HOST_DEVICE inline float fused_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

// 1 / x, rounded to nearest.
CHIASMA_HOST_DEVICE inline float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  return __frcp_rn(x);
#else
  return 1.0f / x;
#endif
}

// For finite numbers of magnitudes up to 448 * scale, the e4m3 codes of the results are those of the rounded quotients;
// a result may differ from its quotient where both are far below the smallest code. Division by a scale is a product
// with a power of two, which is exact, and, where the scale is none, a division by a number in [1, 2): a product with
// its reciprocal, corrected once by the remainder. The first product keeps the remainder from being denormal.
template <bool kIsPowerOfTwo>
class TileQuotient {
 public:
  // scale: a normal number from 2^-126 to 2^126.
  CHIASMA_HOST_DEVICE explicit TileQuotient(float scale) {
    constexpr std::uint32_t kExponentBits = 0x7f800000u;
    constexpr std::uint32_t kOneBits = 0x3f800000u;
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(scale);
    to_unit_ = std::bit_cast<float>(2 * kOneBits - (bits & kExponentBits));
    if constexpr (!kIsPowerOfTwo) {
      divisor_ = std::bit_cast<float>((bits & ~kExponentBits) | kOneBits);
      reciprocal_ = reciprocal(divisor_);
    }
  }

  CHIASMA_HOST_DEVICE float of(float number) const {
    const float dividend = number * to_unit_;
    if constexpr (kIsPowerOfTwo) {
      return dividend;
    } else {
      // WHY the remainder is subtracted in the end: so a zero keeps its sign.
      const float estimate = dividend * reciprocal_;
      const float remainder = fused_multiply_add(estimate, divisor_, -dividend);
      return fused_multiply_add(-remainder, reciprocal_, estimate);
    }
  }

 private:
  float to_unit_;
  float divisor_ = 1.0f, reciprocal_ = 1.0f;
};

}  // namespace chiasma::gpu
