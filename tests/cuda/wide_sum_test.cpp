// The softmax sums of blocks whose scale units are far apart: float32 with a second range for small numbers.
#include "cuda/sm90_sparse_fp8/wide_sum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace chiasma::sm90_sparse_fp8 {
namespace {

constexpr int kLeastLog2 = -122;  // of a sum, once a token was seen
constexpr int kMostLog2 = 109;    // of one term

// As the device does it: too small is zero.
float power_of_two(float exponent) {
  const float power = std::exp2(exponent);
  return power < std::numeric_limits<float>::min() ? 0.0f : power;
}

// What a thread of the kernel does with log2 of one term after the other.
float add(float sum, float log2_term) {
  WideSum wide = WideSum::unpack(sum);
  wide.add(log2_term, power_of_two);
  return wide.pack();
}

float scaled(float sum, float exponent) {
  return scaled_wide(sum, power_of_two(0.5f * exponent), power_of_two(0.5f * (exponent + kLowLog2)));
}

// Read back as store_out does.
double value_of(float sum) {
  return sum < 0.0f ? -std::ldexp(static_cast<double>(sum), -static_cast<int>(kLowLog2)) : static_cast<double>(sum);
}

TEST(WideSum, HoldsEverySizeToFloat32) {
  for (int exponent = kLeastLog2; exponent <= kMostLog2; ++exponent) {
    // A large number of terms, each 2^-20 of the first one, which are lost if float32's range ends between them.
    constexpr int kTerms = 1 << 14;
    float sum = add(0.0f, static_cast<float>(exponent));
    for (int n = 0; n < kTerms; ++n) sum = add(sum, static_cast<float>(exponent - 20));
    const double expected = std::ldexp(1.0 + kTerms * 0x1p-20, exponent);
    ASSERT_NEAR(value_of(sum) / expected, 1.0, 1e-5) << "2^" << exponent;
  }
}

TEST(WideSum, MovesBetweenItsRanges) {
  // A term that dwarfs all before it, then small ones that count together.
  float sum = add(0.0f, -150);
  EXPECT_LT(sum, 0.0f);
  sum = add(sum, 100);
  EXPECT_EQ(sum, 0x1p100f);
  sum = scaled(sum, -220.0f);  // the reference rises by 220
  EXPECT_LT(sum, 0.0f);
  EXPECT_EQ(value_of(sum), 0x1p-120);
  sum = add(sum, -121);
  EXPECT_EQ(value_of(sum), 0x1.8p-120);
}

TEST(WideSum, ScalesInTwoSteps) {
  constexpr int kMostTokensLog2 = 17;
  for (int exponent = kLeastLog2; exponent <= kMostLog2 + kMostTokensLog2; ++exponent) {
    for (int raise = 0; raise <= 500; ++raise) {
      const double expected = std::ldexp(1.0, exponent - raise);
      // Where it counts: a sum is at least 2^-122 in the end, and 2^-39 of that is nothing.
      const double error =
          std::abs(value_of(scaled(add(0.0f, static_cast<float>(exponent)), static_cast<float>(-raise))) - expected);
      ASSERT_LE(error, 1e-6 * expected + 0x1p-161) << "2^" << exponent << " raised by " << raise;
    }
  }
}

TEST(WideSum, EmptyAndNaNStayWhatTheyAre) {
  EXPECT_EQ(add(0.0f, -std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(scaled(0.0f, -std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_TRUE(std::isnan(add(std::numeric_limits<float>::quiet_NaN(), 0.0f)));
  EXPECT_TRUE(std::isnan(scaled(add(1.0f, std::numeric_limits<float>::quiet_NaN()), -1.0f)));
}

}  // namespace
}  // namespace chiasma::sm90_sparse_fp8
