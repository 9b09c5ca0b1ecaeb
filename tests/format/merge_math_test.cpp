// exp and log of merge_math.h against long double, in units of the last place.
#include "format/merge_math.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace chiasma {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double units_apart(double value, long double reference) {
  int exponent = 0;
  std::frexp(static_cast<double>(reference), &exponent);
  return static_cast<double>(std::fabs(static_cast<long double>(value) - reference) / std::ldexp(1.0L, exponent - 53));
}

TEST(MergeMath, ExpIsWithinTwoUnits) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> exponent(-40.0, 9.46);
  for (int n = 0; n < 300'000; ++n) {
    const double x = -std::exp2(exponent(random));
    if (x < -708.0) continue;
    ASSERT_LE(units_apart(exact::exp(x), std::exp(static_cast<long double>(x))), 2.0) << x;
  }
}

TEST(MergeMath, ExpOfSpecialNumbers) {
  EXPECT_EQ(exact::exp(0.0), 1.0);
  EXPECT_EQ(exact::exp(-0.0), 1.0);
  EXPECT_GT(exact::exp(-708.0), 0.0);
  EXPECT_EQ(exact::exp(std::nextafter(-708.0, -kInfinity)), 0.0);
  EXPECT_EQ(exact::exp(-1e300), 0.0);
  EXPECT_EQ(exact::exp(-kInfinity), 0.0);
  EXPECT_TRUE(std::isnan(exact::exp(std::nan(""))));
}

TEST(MergeMath, LogIsWithinTwoUnits) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> exponent(-40.0, 30.0);
  for (int n = 0; n < 300'000; ++n) {
    const double x = 1.0 + std::exp2(exponent(random));
    ASSERT_LE(units_apart(exact::log(x), std::log(static_cast<long double>(x))), 2.0) << x;
  }
}

TEST(MergeMath, LogOfSpecialNumbers) {
  EXPECT_EQ(exact::log(1.0), 0.0);
  EXPECT_EQ(exact::log(2.0), std::log(2.0));
  EXPECT_TRUE(std::isnan(exact::log(std::nan(""))));
}

TEST(MergeMath, OneNan) {
  EXPECT_EQ(std::bit_cast<std::uint32_t>(exact::to_float32(-std::nan("77"))), 0x7fc00000u);
  EXPECT_EQ(exact::to_float32(1e300), std::numeric_limits<float>::infinity());
  EXPECT_EQ(exact::to_float32(-0.1), -0.1f);
}

}  // namespace
}  // namespace chiasma
