// The quantise kernel's way of dividing against division, by the codes that come of it.
#include "cuda/cache/tile_quotient.h"

#include <gtest/gtest.h>

#include <cmath>

#include "format/numbers.h"
#include "format/quantize_tile.h"

namespace chiasma::gpu {
namespace {

template <bool kIsPowerOfTwo>
void expect_codes_of_quotients(float amax, ScaleMode mode, std::uint16_t step) {
  const float scale = tile_scale(mode, amax);
  const TileQuotient<kIsPowerOfTwo> quotient(scale);
  const auto most = static_cast<std::uint32_t>(std::bit_cast<std::uint32_t>(amax) >> 16);
  for (std::uint32_t bits = 0; bits <= most; bits += step) {
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const float number = to_float(bf16_t{static_cast<std::uint16_t>(bits | sign)});
      ASSERT_EQ(float_to_e4m3(quotient.of(number)), float_to_e4m3(number / scale))
          << std::hexfloat << number << " / " << scale << " of a tile with " << amax;
    }
  }
}

// Quotients depend on the two significands, of 128 kinds each, and on the difference of exponents: 13 of those reach
// codes above 0. So all of one binade of tiles with all of their numbers are all there is, away from the ends of the
// range.
TEST(TileQuotient, EveryNumberOfTilesOfAnOrdinarySize) {
  for (std::uint16_t bits = 0x3f80; bits < 0x4000; ++bits) {
    expect_codes_of_quotients<false>(to_float(bf16_t{bits}), ScaleMode::amax, 1);
    expect_codes_of_quotients<true>(to_float(bf16_t{bits}), ScaleMode::pow2, 1);
  }
}

TEST(TileQuotient, EveryNumberOfTheSmallestTiles) {
  for (std::uint16_t bits = 1; bits < 0x0700; ++bits) {
    expect_codes_of_quotients<false>(to_float(bf16_t{bits}), ScaleMode::amax, 1);
    expect_codes_of_quotients<true>(to_float(bf16_t{bits}), ScaleMode::pow2, 1);
  }
}

TEST(TileQuotient, EveryNumberOfTheLargestTiles) {
  for (std::uint16_t bits = 0x7f00; bits < 0x7f80; ++bits) {
    expect_codes_of_quotients<false>(to_float(bf16_t{bits}), ScaleMode::amax, 1);
    expect_codes_of_quotients<true>(to_float(bf16_t{bits}), ScaleMode::pow2, 1);
  }
}

// Tiles of all sizes, some of the numbers of each.
TEST(TileQuotient, TilesOfEverySize) {
  for (std::uint16_t bits = 1; bits < 0x7f80; bits = static_cast<std::uint16_t>(bits + 7)) {
    expect_codes_of_quotients<false>(to_float(bf16_t{bits}), ScaleMode::amax, 61);
    expect_codes_of_quotients<true>(to_float(bf16_t{bits}), ScaleMode::pow2, 61);
  }
}

TEST(TileQuotient, ZerosKeepTheirSign) {
  const TileQuotient<false> quotient(0.3f);
  EXPECT_FALSE(std::signbit(quotient.of(0.0f)));
  EXPECT_TRUE(std::signbit(quotient.of(-0.0f)));
}

}  // namespace
}  // namespace chiasma::gpu
