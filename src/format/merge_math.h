// float64 arithmetic that gives the same bits on every host and device: each operation is rounded once, none is fused
// with another, and exp and log are sums of such operations. For merging partial results.
#pragma once

#include <bit>
#include <cstdint>

#include "format/kv_format.h"

namespace chiasma::exact {

// Host files that include this are compiled without contraction (see CMakeLists.txt).
CHIASMA_HOST_DEVICE inline double multiply(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
CHIASMA_HOST_DEVICE inline double add(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}
CHIASMA_HOST_DEVICE inline double divide(double a, double b) {
#ifdef __CUDA_ARCH__
  return __ddiv_rn(a, b);
#else
  return a / b;
#endif
}

// ln 2 in two parts, the first so short that its product with an exponent is exact.
inline constexpr double kLn2High = 0x1.62e42feep-1;
inline constexpr double kLn2Low = 0x1.a39ef35793c76p-33;

// e^x for x <= 0, within 2 units in the last place; 0 below -708, where the result would leave float64's normal range;
// NaN for NaN. e^0 is 1.
CHIASMA_HOST_DEVICE inline double exp(double x) {
  if (x < -708.0) return 0.0;
  constexpr double kLog2E = 0x1.71547652b82fep+0;
  // Adding this rounds to an integer, which then is the sum's low bits.
  constexpr double kRounder = 0x1.8p52;
  const double power = add(add(multiply(x, kLog2E), kRounder), -kRounder);
  const double rest = add(add(x, -multiply(power, kLn2High)), -multiply(power, kLn2Low));
  // Its Taylor series: |rest| <= ln 2 / 2, so that the first term left out is below 2^-57.
  constexpr double kOneOverFactorial[] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800};
  constexpr int kTerms = static_cast<int>(sizeof(kOneOverFactorial) / sizeof(double)) - 1;
  double sum = kOneOverFactorial[kTerms];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int n = kTerms - 1; n >= 0; --n) sum = add(kOneOverFactorial[n], multiply(rest, sum));
  if (power != power) return power;
  const auto exponent = static_cast<std::uint64_t>(static_cast<std::int64_t>(power) + 1023) << 52;
  return multiply(sum, std::bit_cast<double>(exponent));
}

// ln x for finite x >= 1, within 2 units in the last place; NaN for NaN. ln 1 is 0.
CHIASMA_HOST_DEVICE inline double log(double x) {
  if (x != x) return x;
  constexpr double kSqrt2 = 0x1.6a09e667f3bcdp+0;
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x);
  int power = static_cast<int>(bits >> 52) - 1023;
  double mantissa = std::bit_cast<double>((bits & 0xfffffffffffffull) | std::uint64_t{1023} << 52);
  if (mantissa > kSqrt2) {
    mantissa = multiply(mantissa, 0.5);
    ++power;
  }
  // 2 artanh(f), f = (m - 1) / (m + 1): |f| < 0.172, so that the first term left out is below 2^-60.
  const double f = divide(add(mantissa, -1.0), add(mantissa, 1.0));
  const double square = multiply(f, f);
  constexpr double kOneOverOdd[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13,
                                    1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
  double sum = 0.0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int n = static_cast<int>(sizeof(kOneOverOdd) / sizeof(double)) - 1; n >= 0; --n) {
    sum = multiply(square, add(sum, kOneOverOdd[n]));
  }
  const double of_mantissa = multiply(2.0, add(f, multiply(f, sum)));
  return add(add(of_mantissa, multiply(power, kLn2Low)), multiply(power, kLn2High));
}

// The one NaN that results are written with; devices differ in the one that arithmetic gives.
CHIASMA_HOST_DEVICE inline float to_float32(double value) {
  return value != value ? std::bit_cast<float>(0x7fc00000u) : static_cast<float>(value);
}

}  // namespace chiasma::exact
