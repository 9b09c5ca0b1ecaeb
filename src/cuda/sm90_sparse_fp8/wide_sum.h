// The sum of a head's probabilities, relative to a reference that follows probability times scale unit (softmax_step).
//
// With units from 2^-96 to 2^127 and weights up to 2^13, a token adds up to 2^109; 2^17 such tokens fit into float32.
// The other end does not: the token that the reference was raised for has a weight of 2^5, so that the sum is at least
// 2^(5 - 127), and what is 2^24 times smaller than that still counts if there is enough of it. So a negative number
// stands for its size times 2^-64. Terms that are lost either way are below 2^-126 where the sum is above 2^-40, and
// below 2^-190 where it is above 2^-122.
//
// Near units, within 2^-40 and 2^41, need none of this: the sum is at least 2^(5 - 41), and a term that is lost because
// its weight is below 2^-126 is less than 2^-86.
#pragma once

#include "format/kv_format.h"

namespace chiasma::sm90_sparse_fp8 {

inline constexpr float kNearLog2Unit = 40.0f;
inline constexpr float kLowLog2 = 64.0f;
inline constexpr float kLow = 0x1p64f;
inline constexpr float kLeastPlain = 0x1p-40f;

// Both are the sum: as it is, where float32 holds it, and times 2^64, where that holds it.
struct WideSum {
  float plain, low;

  CHIASMA_HOST_DEVICE static WideSum unpack(float sum) {
    return sum < 0.0f ? WideSum{-sum / kLow, -sum} : WideSum{sum, sum * kLow};
  }
  template <typename Exp2>
  CHIASMA_HOST_DEVICE void add(float log2_term, Exp2 exp2) {
    plain += exp2(log2_term);
    low += exp2(log2_term + kLowLog2);
  }
  CHIASMA_HOST_DEVICE float pack() const { return plain >= kLeastPlain ? plain : -low; }
};

// Times 2^exponent, exponent <= 0, which itself may be too small for float32: root is 2^(exponent / 2), low_root 2^32
// times that.
CHIASMA_HOST_DEVICE inline float scaled_wide(float sum, float root, float low_root) {
  const bool is_low = sum < 0.0f;
  const float size = is_low ? -sum : sum;
  const float same = size * root * root;
  return is_low ? WideSum{same / kLow, same}.pack() : WideSum{same, size * low_root * low_root}.pack();
}

}  // namespace chiasma::sm90_sparse_fp8
