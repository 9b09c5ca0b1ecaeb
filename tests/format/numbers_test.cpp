// The scalar number conversions against formulas written from the formats' definitions, over every code.
#include "format/numbers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace chiasma {
namespace {

float from_bits(std::uint32_t bits) {
  return std::bit_cast<float>(bits);
}
std::uint32_t bits_of(float value) {
  return std::bit_cast<std::uint32_t>(value);
}

// Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; exponent 0 is subnormal; all ones is NaN, there is no
// infinity.
std::optional<double> e4m3_by_definition(int code) {
  const int sign = code / 128;
  const int exponent = code / 8 % 16;
  const int mantissa = code % 8;
  if (exponent == 15 && mantissa == 7) return std::nullopt;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa / 8.0, -6) : std::ldexp(1.0 + mantissa / 8.0, exponent - 7);
  return sign == 1 ? -magnitude : magnitude;
}

// The code nearest to a value, found by trying all of them; of two equally near the one with an even mantissa.
int nearest_e4m3(double value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  int best = 0;
  double best_distance = std::numeric_limits<double>::infinity();
  for (int magnitude = 0; magnitude < 0x7f; ++magnitude) {
    const double distance = std::fabs(std::fabs(value) - *e4m3_by_definition(magnitude));
    if (distance < best_distance || (distance == best_distance && magnitude % 2 == 0)) {
      best = magnitude;
      best_distance = distance;
    }
  }
  return sign | best;
}

TEST(E4m3, DecodesEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<std::uint8_t>(code));
    const std::optional<double> expected = e4m3_by_definition(code);
    if (expected) {
      EXPECT_EQ(value, *expected) << "code " << code;
    } else {
      EXPECT_TRUE(std::isnan(value)) << "code " << code;
    }
    EXPECT_EQ(std::signbit(value), code >= 128) << "code " << code;
  }
}

TEST(E4m3, LargestIsTheNamedConstant) {
  EXPECT_EQ(e4m3_to_float(0x7e), kE4m3Max);
  EXPECT_EQ(e4m3_to_float(0x38), 1.0f);
}

TEST(E4m3, EncodesEveryCodeToItself) {
  for (int code = 0; code < 256; ++code) {
    const std::uint8_t byte = static_cast<std::uint8_t>(code);
    EXPECT_EQ(float_to_e4m3(e4m3_to_float(byte)), byte) << "code " << code;
  }
}

// At every boundary between neighbouring codes: the midpoint itself and the floats next to it.
TEST(E4m3, RoundsTiesToEvenAndTheRestToNearest) {
  for (int magnitude = 0; magnitude < 0x7e; ++magnitude) {
    const double low = *e4m3_by_definition(magnitude);
    const double high = *e4m3_by_definition(magnitude + 1);
    const float middle = static_cast<float>((low + high) / 2);
    const int even = magnitude % 2 == 0 ? magnitude : magnitude + 1;
    EXPECT_EQ(float_to_e4m3(middle), even);
    EXPECT_EQ(float_to_e4m3(-middle), 0x80 | even);
    EXPECT_EQ(float_to_e4m3(std::nextafter(middle, 0.0f)), magnitude);
    EXPECT_EQ(float_to_e4m3(std::nextafter(middle, 1e9f)), magnitude + 1);
  }
}

// Every float32 whose low 14 bits are 0 or 1 or all ones, from far below the subnormals to far above the largest code.
TEST(E4m3, EncodesToTheNearestCode) {
  const std::uint32_t first = bits_of(std::ldexp(1.0f, -14));
  const std::uint32_t last = bits_of(1024.0f);
  for (std::uint32_t base = first; base <= last; base += 1u << 14) {
    for (const std::uint32_t bits : {base - 1, base, base + 1}) {
      const float value = from_bits(bits);
      ASSERT_EQ(float_to_e4m3(value), nearest_e4m3(value)) << std::hexfloat << value;
      ASSERT_EQ(float_to_e4m3(-value), nearest_e4m3(-value)) << std::hexfloat << -value;
    }
  }
}

TEST(E4m3, TinyValuesBecomeZeroWithTheirSign) {
  for (const float value : {0.0f, from_bits(1), std::numeric_limits<float>::min(), 0x1p-11f, 0x1p-10f}) {
    EXPECT_EQ(float_to_e4m3(value), 0x00) << value;
    EXPECT_EQ(float_to_e4m3(-value), 0x80) << value;
  }
  EXPECT_EQ(float_to_e4m3(std::nextafter(0x1p-10f, 1.0f)), 0x01);
}

TEST(E4m3, SaturatesAndKeepsNan) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float value :
       {448.0f, 463.9f, 464.0f, 465.0f, 480.0f, 1e30f, std::numeric_limits<float>::max(), kInfinity}) {
    EXPECT_EQ(float_to_e4m3(value), 0x7e) << value;
    EXPECT_EQ(float_to_e4m3(-value), 0xfe) << value;
  }
  for (const std::uint32_t nan : {0x7f800001u, 0x7fc00000u, 0x7fffffffu}) {
    EXPECT_EQ(float_to_e4m3(from_bits(nan)), 0x7f) << nan;
    EXPECT_EQ(float_to_e4m3(from_bits(nan | 0x80000000u)), 0xff) << nan;
  }
}

// Sign, 8 bits of exponent with bias 127, 7 bits of mantissa.
TEST(Bf16, DecodesAndReencodesEveryCode) {
  for (std::uint32_t code = 0; code < 65536; ++code) {
    const int exponent = static_cast<int>(code >> 7 & 0xff);
    const int mantissa = static_cast<int>(code & 0x7f);
    const double sign = code >= 0x8000 ? -1.0 : 1.0;
    const bf16_t stored{static_cast<std::uint16_t>(code)};
    const float value = to_float(stored);
    if (exponent == 255 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(value)) << code;
      const bf16_t back = to_bf16(value);
      ASSERT_TRUE(std::isnan(to_float(back))) << code;
      ASSERT_EQ(back.bits >> 15, code >> 15) << code;
      continue;
    }
    const double expected = exponent == 255 ? sign * std::numeric_limits<double>::infinity()
                            : exponent == 0 ? sign * std::ldexp(mantissa / 128.0, -126)
                                            : sign * std::ldexp(1.0 + mantissa / 128.0, exponent - 127);
    ASSERT_EQ(value, expected) << code;
    ASSERT_EQ(to_bf16(value), stored) << code;
  }
}

// Between every two neighbouring finite codes: the middle goes to the even one, its neighbours to the nearest.
TEST(Bf16, RoundsToNearestEven) {
  for (std::uint32_t code = 0; code < 0x7f80; ++code) {
    const std::uint32_t middle = (code << 16) + 0x8000u;
    ASSERT_EQ(to_bf16(from_bits(middle)).bits, code + (code & 1)) << code;
    ASSERT_EQ(to_bf16(from_bits(middle - 1)).bits, code) << code;
    ASSERT_EQ(to_bf16(from_bits(middle + 1)).bits, code + 1) << code;
    ASSERT_EQ(to_bf16(from_bits(middle | 0x80000000u)).bits, 0x8000u + code + (code & 1)) << code;
  }
  EXPECT_EQ(to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80) << "overflow becomes infinity";
}

TEST(Bf16, NanWithALowPayloadStaysNan) {
  EXPECT_TRUE(std::isnan(to_float(to_bf16(from_bits(0x7f800001u)))));
  EXPECT_TRUE(std::isnan(to_float(to_bf16(from_bits(0xffffffffu)))));
}

TEST(Ue8m0, DecodesEveryCode) {
  for (int code = 0; code < 255; ++code) {
    EXPECT_EQ(ue8m0_to_float(static_cast<std::uint8_t>(code)), std::ldexp(1.0, code - 127)) << code;
  }
  EXPECT_TRUE(std::isnan(ue8m0_to_float(0xff)));
}

}  // namespace
}  // namespace chiasma
