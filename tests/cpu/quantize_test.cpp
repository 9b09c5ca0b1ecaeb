// The quantiser and dequantiser against slow exact references, over every bf16 input, and their manners towards bytes
// that are not theirs.
#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpu/cache_ops.h"
#include "format/quantize_tile.h"
#include "tests/cpu/brute_force.h"
#include "tests/cpu/paged_cache.h"

namespace chiasma::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Nearest code by trial of all, ties to the even one; saturating. What is not finite becomes the one NaN code.
int best_code(double value) {
  if (!std::isfinite(value)) return 0x7f;
  const int sign = std::signbit(value) ? 0x80 : 0;
  if (std::fabs(value) >= 448) return sign | 0x7e;
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const Real distance = std::fabs(std::fabs(value) - e4m3_value(code));
    const Real best_distance = std::fabs(std::fabs(value) - e4m3_value(best));
    if (distance < best_distance || (distance == best_distance && code % 2 == 0)) best = code;
  }
  return sign | best;
}

// Smallest power of two, at least 2^-13, that brings amax to 448 or less.
double slow_pow2_scale(double amax) {
  int exponent = -13;
  while (std::ldexp(448.0, exponent) < amax) ++exponent;
  return std::ldexp(1.0, exponent);
}

// WHY the detour over double is the correctly rounded float32 quotient: 53 >= 2 * 24 + 2 bits make the second rounding
// harmless.
float exact_quotient(float a, float b) {
  return static_cast<float>(static_cast<double>(a) / static_cast<double>(b));
}

float slow_scale(const std::vector<float>& tile, ScaleMode mode) {
  float amax = 0;
  for (const float value : tile) {
    if (std::isfinite(value)) amax = std::max(amax, std::fabs(value));
  }
  if (mode == ScaleMode::pow2) return static_cast<float>(slow_pow2_scale(static_cast<double>(amax)));
  return std::max(exact_quotient(amax, 448.0f), 0x1p-126f);
}

void expect_tile_is_exact(const std::vector<float>& tile, ScaleMode mode) {
  std::vector<std::uint8_t> codes(tile.size());
  const int count = static_cast<int>(tile.size());
  const TileScale result = quantize_tile(tile.data(), count, mode, codes.data());
  const float scale = slow_scale(tile, mode);
  ASSERT_EQ(result.scale, scale);
  const bool is_zero = std::all_of(tile.begin(), tile.end(), [](float value) { return value == 0.0f; });
  for (std::size_t i = 0; i < tile.size(); ++i) {
    ASSERT_EQ(codes[i], is_zero ? 0 : best_code(exact_quotient(tile[i], scale)))
        << std::hexfloat << tile[i] << " / " << scale;
  }
}

TEST(Scale, Pow2IsExactForEveryBf16Amax) {
  for (std::uint16_t bits = 0; bits < 0x7f80; ++bits) {
    const float amax = to_float(bf16_t{bits});
    ASSERT_EQ(tile_scale(ScaleMode::pow2, amax), slow_pow2_scale(static_cast<double>(amax))) << amax;
  }
}

// amax / 448 in float32 would round these quotients to a power of two from both sides.
TEST(Scale, Pow2IsExactNextToEveryBoundary) {
  for (int exponent = -20; exponent < 119; ++exponent) {
    const float boundary = std::ldexp(448.0f, exponent);
    for (const float amax : {std::nextafter(boundary, 0.0f), boundary, std::nextafter(boundary, kInfinity)}) {
      ASSERT_EQ(tile_scale(ScaleMode::pow2, amax), slow_pow2_scale(static_cast<double>(amax))) << std::hexfloat << amax;
    }
  }
}

TEST(Scale, AmaxIsTheCorrectlyRoundedQuotientAndNeverDenormal) {
  for (std::uint16_t bits = 0; bits < 0x7f80; ++bits) {
    const float amax = to_float(bf16_t{bits});
    const float quotient = exact_quotient(amax, 448.0f);
    ASSERT_EQ(tile_scale(ScaleMode::amax, amax), quotient >= 0x1p-126f ? quotient : 0x1p-126f) << amax;
  }
}

class Tile : public testing::TestWithParam<ScaleMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, Tile, testing::Values(ScaleMode::pow2, ScaleMode::amax),
                         [](const auto& mode) { return mode.param == ScaleMode::pow2 ? "pow2" : "amax"; });

TEST_P(Tile, RandomTilesEqualTheSlowReference) {
  std::mt19937 random(11);
  for (int trial = 0; trial < 200; ++trial) {
    const float deviation = std::exp2(std::uniform_real_distribution<float>(-140.0f, 120.0f)(random));
    std::vector<float> tile;
    for (int i = 0; i < 128; ++i) tile.push_back(to_float(random_bf16(random, deviation)));
    if (trial % 4 == 0) tile[static_cast<std::size_t>(trial) % 128] *= 50.0f;  // an outlier pushes the rest down
    expect_tile_is_exact(tile, GetParam());
  }
}

// Tiles of a realistic width of values, where most quotients lie between normal codes.
TEST_P(Tile, OrdinaryMagnitudesEqualTheSlowReference) {
  std::mt19937 random(12);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> tile;
    for (int i = 0; i < 64; ++i) tile.push_back(std::normal_distribution<float>(0.0f, 3.0f)(random));
    expect_tile_is_exact(tile, GetParam());
  }
}

TEST_P(Tile, EveryBf16ValueEqualsTheSlowReference) {
  for (std::uint32_t first = 0; first < 65536; first += 128) {
    std::vector<float> tile;
    for (std::uint32_t i = 0; i < 128; ++i) tile.push_back(to_float(bf16_t{static_cast<std::uint16_t>(first + i)}));
    expect_tile_is_exact(tile, GetParam());
  }
}

TEST_P(Tile, ZerosGetZeroCodesAndAPositiveScale) {
  std::uint8_t codes[64];
  std::fill_n(codes, 64, std::uint8_t{0xee});
  std::vector<float> zeros(64, 0.0f);
  for (std::size_t i = 0; i < zeros.size(); i += 3) zeros[i] = -0.0f;
  const TileScale result = quantize_tile(zeros.data(), 64, GetParam(), codes);
  EXPECT_EQ(result.scale, GetParam() == ScaleMode::pow2 ? 0x1p-13f : 0x1p-126f);
  for (const std::uint8_t code : codes) EXPECT_EQ(code, 0);
}

TEST_P(Tile, NonfiniteValuesChangeNothingElse) {
  std::vector<float> clean(128);
  for (std::size_t i = 0; i < clean.size(); ++i) clean[i] = static_cast<float>(i) - 60.5f;
  std::vector<float> spoilt = clean;
  const std::pair<std::size_t, float> spoils[] = {{3, kNan}, {64, -kNan}, {65, kInfinity}, {127, -kInfinity}};
  for (const auto& [position, value] : spoils) {
    clean[position] = 0.0f;
    spoilt[position] = value;
  }
  std::uint8_t clean_codes[128], spoilt_codes[128];
  const TileScale expected = quantize_tile(clean.data(), 128, GetParam(), clean_codes);
  const TileScale actual = quantize_tile(spoilt.data(), 128, GetParam(), spoilt_codes);
  EXPECT_EQ(actual.scale, expected.scale);
  EXPECT_EQ(expected.num_nonfinite, 0);
  EXPECT_EQ(actual.num_nonfinite, 4);
  clean_codes[3] = 0x7f;
  clean_codes[64] = clean_codes[65] = clean_codes[127] = 0x7f;
  for (int i = 0; i < 128; ++i) EXPECT_EQ(spoilt_codes[i], clean_codes[i]) << i;
}

TEST_P(Tile, OnlyNonfiniteValuesStillGiveAFinitePositiveScale) {
  const std::vector<float> tile = {kNan, kInfinity, -kInfinity, 0.0f};
  std::uint8_t codes[4];
  const TileScale result = quantize_tile(tile.data(), 4, GetParam(), codes);
  EXPECT_GT(result.scale, 0.0f);
  EXPECT_TRUE(std::isfinite(result.scale));
  EXPECT_EQ(codes[0], 0x7f);
  EXPECT_EQ(codes[1], 0x7f);
  EXPECT_EQ(codes[2], 0x7f);
  EXPECT_EQ(codes[3], 0x00);
}

// ---- whole caches ----

struct Mode {
  KvFormat format;
  ScaleMode scale;
};
constexpr Mode kModes[] = {{KvFormat::v32, ScaleMode::pow2},
                           {KvFormat::v32, ScaleMode::amax},
                           {KvFormat::v4, ScaleMode::pow2},
                           {KvFormat::v41, ScaleMode::pow2},
                           {KvFormat::v41plane, ScaleMode::pow2},
                           {KvFormat::v32nope, ScaleMode::amax},
                           {KvFormat::v32nope_compact, ScaleMode::amax}};

// Rows of bf16 with NaN between them.
class Rows {
 public:
  Rows(KvFormat format, std::int64_t tokens, std::uint32_t seed)
      : dim_(key_dim(format)), tokens_(tokens), data_(static_cast<std::size_t>(tokens * stride()), bf16_t{0x7fff}) {
    std::mt19937 random(seed);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const float deviation = std::exp2(std::uniform_real_distribution<float>(-8.0f, 8.0f)(random));
      for (int c = 0; c < dim_; ++c) row(token)[c] = random_bf16(random, deviation);
    }
  }
  bf16_t* row(std::int64_t token) { return data_.data() + token * stride(); }
  std::int64_t stride() const { return dim_ + 8; }
  std::int64_t tokens() const { return tokens_; }
  int dim() const { return dim_; }

 private:
  int dim_;
  std::int64_t tokens_;
  std::vector<bf16_t> data_;
};

std::int64_t quantize(const Mode& mode, Rows& rows, PagedCache& cache,
                      const std::vector<std::int64_t>* mapping = nullptr) {
  std::int64_t nonfinite = -1;
  QuantizeProblem problem{};
  problem.format = mode.format;
  problem.scale = mode.scale;
  problem.tokens = rows.tokens();
  problem.kv = rows.row(0);
  problem.kv_stride = rows.stride();
  problem.rope = problem.kv + rows.dim() - kRopeDim;
  problem.rope_stride = rows.stride();
  problem.slot_mapping = mapping == nullptr ? nullptr : mapping->data();
  problem.slot_mapping_stride = 1;
  problem.cache = cache.data();
  problem.pool = cache.pool();
  problem.nonfinite_count = &nonfinite;
  cpu::quantize(problem);
  return nonfinite;
}

std::vector<Real> stored_key(KvFormat format, PagedCache& cache, std::int64_t slot) {
  return brute_key(format, cache.pool(), slot / cache.page_size(), slot % cache.page_size());
}

// Everything a slot's bytes hold, for equality.
std::vector<std::byte> stored_bytes(KvFormat format, PagedCache& cache, std::int64_t slot) {
  const std::byte* page = cache.page(slot / cache.page_size());
  const std::int64_t offset = slot % cache.page_size();
  const std::byte* row = page + offset * row_stride_bytes(format);
  // The last bytes of v32nope's rows are nobody's.
  std::vector<std::byte> bytes(row, row + (format == KvFormat::v32nope ? 528 : row_stride_bytes(format)));
  const std::byte* scales = page + plane_offset(format, cache.page_size(), offset);
  bytes.insert(bytes.end(), scales, scales + traits_of(format).plane_group_bytes);
  return bytes;
}

TEST(Quantize, ErrorIsBoundedAndRopeIsExact) {
  for (const Mode& mode : kModes) {
    for (const std::int64_t page : {1, 2, 61, 64}) {
      Rows rows(mode.format, 3 * page, 21);
      PagedCache cache(mode.format, 3, page, 48);
      EXPECT_EQ(quantize(mode, rows, cache), 0);
      EXPECT_TRUE(cache.guards_intact());
      for (std::int64_t slot = 0; slot < cache.num_slots(); ++slot) {
        const std::vector<Real> key = stored_key(mode.format, cache, slot);
        const int nope = traits_of(mode.format).code_columns, tile_dim = traits_of(mode.format).scale_columns;
        for (int c = 0; c < rows.dim(); ++c) {
          const Real value = static_cast<Real>(to_float(rows.row(slot)[c]));
          if (c >= nope) {
            ASSERT_EQ(key[static_cast<std::size_t>(c)], value);
            continue;
          }
          std::vector<float> tile;
          const int first = c / tile_dim * tile_dim;
          for (int i = 0; i < tile_dim; ++i) tile.push_back(to_float(rows.row(slot)[first + i]));
          // Half a step of a 3-bit mantissa, or half the subnormal step; a little more for the rounded quotient.
          const Real scale = static_cast<Real>(slow_scale(tile, mode.scale));
          const Real bound = std::max(std::fabs(value) / 16, scale * 0x1p-10L) * (1 + 0x1p-20L);
          ASSERT_LE(std::fabs(key[static_cast<std::size_t>(c)] - value), bound) << "slot " << slot << " c " << c;
        }
      }
    }
  }
}

TEST(Quantize, EveryRowEqualsItsTiles) {
  for (const Mode& mode : kModes) {
    Rows rows(mode.format, 5, 22);
    PagedCache cache(mode.format, 5, 1);
    quantize(mode, rows, cache);
    const RowTraits traits = traits_of(mode.format);
    const int tile_dim = traits.scale_columns;
    for (std::int64_t token = 0; token < 5; ++token) {
      const auto* row = reinterpret_cast<const unsigned char*>(cache.page(token));
      for (int tile = 0; tile < traits.num_scales(); ++tile) {
        std::vector<float> values;
        for (int i = 0; i < tile_dim; ++i) values.push_back(to_float(rows.row(token)[tile * tile_dim + i]));
        const float scale = slow_scale(values, mode.scale);
        if (traits.scale_type == ScaleType::ue8m0) {
          const int begin = traits.has_scale_plane() ? traits.row_bytes : traits.scales_offset;
          ASSERT_EQ(row[begin + tile], std::ilogb(scale) + 127);
          if (mode.format == KvFormat::v4) {
            ASSERT_EQ(row[begin + 7], 0) << "pad byte";
          }
        } else {
          float stored = 0;
          std::memcpy(&stored, row + 512 + 4 * tile, 4);
          ASSERT_EQ(stored, scale);
        }
        for (int i = 0; i < tile_dim; ++i) {
          const float value = values[static_cast<std::size_t>(i)];
          ASSERT_EQ(row[tile * tile_dim + i], best_code(exact_quotient(value, scale)));
        }
      }
    }
  }
}

TEST(Quantize, RopeBitsPassUnchangedNanPayloadsIncluded) {
  for (const Mode& mode : kModes) {
    if (traits_of(mode.format).bf16_columns == 0) continue;
    Rows rows(mode.format, 1, 23);
    const std::uint16_t patterns[] = {0x7f81, 0xffff, 0x7f80, 0xff80, 0x0001, 0x8000};
    for (int i = 0; i < 6; ++i) rows.row(0)[rows.dim() - 6 + i] = bf16_t{patterns[i]};
    rows.row(0)[rows.dim() - 64] = bf16_t{0x7f80};
    PagedCache cache(mode.format, 1, 1);
    EXPECT_EQ(quantize(mode, rows, cache), 5);
    const std::byte* rope = cache.page(0) + (mode.format == KvFormat::v4 ? 448 : 528);
    EXPECT_EQ(std::memcmp(rope, rows.row(0) + rows.dim() - 64, 128), 0);
  }
}

TEST(Quantize, NonfiniteInputsStayInTheirTileAndAreCounted) {
  for (const Mode& mode : kModes) {
    Rows clean(mode.format, 3, 24), spoilt(mode.format, 3, 24);
    const int tile_dim = traits_of(mode.format).scale_columns;
    spoilt.row(1)[tile_dim] = to_bf16(kNan);
    spoilt.row(1)[2 * tile_dim - 1] = to_bf16(-kInfinity);
    PagedCache expected(mode.format, 1, 3), actual(mode.format, 1, 3);
    EXPECT_EQ(quantize(mode, clean, expected), 0);
    EXPECT_EQ(quantize(mode, spoilt, actual), 2);
    EXPECT_EQ(stored_bytes(mode.format, actual, 0), stored_bytes(mode.format, expected, 0));
    EXPECT_EQ(stored_bytes(mode.format, actual, 2), stored_bytes(mode.format, expected, 2));
    const std::vector<Real> want = stored_key(mode.format, expected, 1), got = stored_key(mode.format, actual, 1);
    for (int c = 0; c < clean.dim(); ++c) {
      const std::size_t i = static_cast<std::size_t>(c);
      if (c == tile_dim || c == 2 * tile_dim - 1) {
        EXPECT_TRUE(std::isnan(got[i]));
      } else if (c / tile_dim != 1) {
        EXPECT_EQ(got[i], want[i]) << c;
      } else {
        EXPECT_TRUE(std::isfinite(got[i])) << c;
      }
    }
  }
}

TEST(Quantize, SlotMappingScattersAndSkips) {
  for (const Mode& mode : kModes) {
    constexpr std::int64_t kTooLarge = std::int64_t{1} << 40;
    const std::vector<std::int64_t> mapping = {7, -1, 0, 121, 122, -5, 60, 61, kTooLarge};  // 122 slots: 0..121
    Rows rows(mode.format, static_cast<std::int64_t>(mapping.size()), 25);
    rows.row(1)[0] = rows.row(4)[0] = to_bf16(kNan);  // of skipped rows, not counted
    rows.row(6)[1] = to_bf16(kInfinity);
    PagedCache direct(mode.format, 9, 1);
    quantize(mode, rows, direct);
    PagedCache cache(mode.format, 2, 61, 16);
    cache.fill(0xcc);
    PagedCache untouched(mode.format, 2, 61, 16);
    untouched.fill(0xcc);
    EXPECT_EQ(quantize(mode, rows, cache, &mapping), 1);
    EXPECT_TRUE(cache.guards_intact());
    for (std::int64_t slot = 0; slot < 122; ++slot) {
      const auto found = std::find(mapping.begin(), mapping.end(), slot);
      const bool written = found != mapping.end();
      EXPECT_EQ(stored_bytes(mode.format, cache, slot), written
                                                            ? stored_bytes(mode.format, direct, found - mapping.begin())
                                                            : stored_bytes(mode.format, untouched, slot))
          << format_name(mode.format) << " slot " << slot;
    }
  }
}

// Enough rows that threads share the work, few enough slots that they all meet.
TEST(Quantize, LaterRowWinsAtAnyThreadCount) {
  constexpr std::int64_t kTokens = 600, kSlots = 7;
  std::mt19937 random(26);
  std::vector<std::int64_t> mapping, last(kSlots, -1);
  for (std::int64_t token = 0; token < kTokens; ++token) {
    mapping.push_back(static_cast<std::int64_t>(random() % (kSlots + 1)) - 1);
    if (mapping.back() >= 0) last[static_cast<std::size_t>(mapping.back())] = token;
  }
  const int threads_before = omp_get_max_threads();
  for (const Mode& mode : kModes) {
    Rows rows(mode.format, kTokens, 27);
    PagedCache direct(mode.format, kTokens, 1);
    quantize(mode, rows, direct);
    for (const int threads : {1, 2, 5}) {
      omp_set_num_threads(threads);
      PagedCache cache(mode.format, 1, kSlots);
      quantize(mode, rows, cache, &mapping);
      for (std::int64_t slot = 0; slot < kSlots; ++slot) {
        EXPECT_EQ(stored_bytes(mode.format, cache, slot),
                  stored_bytes(mode.format, direct, last[static_cast<std::size_t>(slot)]))
            << threads << " threads, slot " << slot;
      }
    }
  }
  omp_set_num_threads(threads_before);
}

TEST(Quantize, RotaryColumnsOfATensorOfTheirOwnGiveTheSameBytes) {
  for (const Mode& mode : kModes) {
    if (!traits_of(mode.format).has_rope) continue;
    Rows rows(mode.format, 9, 29);
    PagedCache joined(mode.format, 3, 3), split(mode.format, 3, 3);
    quantize(mode, rows, joined);
    std::vector<bf16_t> rope(9 * (kRopeDim + 5), bf16_t{0x7fff});
    for (std::int64_t token = 0; token < 9; ++token) {
      bf16_t* own = rows.row(token) + rows.dim() - kRopeDim;
      std::copy_n(own, kRopeDim, rope.begin() + token * (kRopeDim + 5));
      std::fill_n(own, kRopeDim, bf16_t{0x7fff});
    }
    QuantizeProblem problem{};
    problem.format = mode.format;
    problem.scale = mode.scale;
    problem.tokens = 9;
    problem.kv = rows.row(0);
    problem.kv_stride = rows.stride();
    problem.rope = rope.data();
    problem.rope_stride = kRopeDim + 5;
    problem.cache = split.data();
    problem.pool = split.pool();
    cpu::quantize(problem);
    for (std::int64_t slot = 0; slot < 9; ++slot) {
      EXPECT_EQ(stored_bytes(mode.format, split, slot), stored_bytes(mode.format, joined, slot));
    }
  }
}

// Slots that are not there are counted once each, however many threads look; -1 is skipped on purpose.
TEST(Quantize, RowsWithoutASlotAreCounted) {
  constexpr std::int64_t kTokens = 300;
  Rows rows(KvFormat::v32, kTokens, 31);
  PagedCache cache(KvFormat::v32, 5, 61);
  std::vector<std::int64_t> mapping(kTokens);
  std::int64_t expected = 0;
  for (std::int64_t i = 0; i < kTokens; ++i) {
    const std::int64_t slots[] = {i, -1, cache.num_slots(), -2, std::numeric_limits<std::int64_t>::max()};
    mapping[static_cast<std::size_t>(i)] = slots[i % 5];
    expected += i % 5 >= 2;
  }
  const int threads_before = omp_get_max_threads();
  for (const int threads : {1, 2, 3}) {
    omp_set_num_threads(threads);
    QuantizeProblem problem{};
    problem.format = KvFormat::v32;
    problem.scale = ScaleMode::pow2;
    problem.tokens = kTokens;
    problem.kv = rows.row(0);
    problem.kv_stride = problem.rope_stride = rows.stride();
    problem.rope = problem.kv + rows.dim() - kRopeDim;
    problem.slot_mapping = mapping.data();
    problem.slot_mapping_stride = 1;
    problem.cache = cache.data();
    problem.pool = cache.pool();
    std::int64_t skipped = -1;
    problem.skipped_count = &skipped;
    cpu::quantize(problem);
    EXPECT_EQ(skipped, expected) << threads << " threads";
  }
  omp_set_num_threads(threads_before);
}

TEST(Quantize, OneScaleForTheCacheIsUsedAsGiven) {
  for (const KvFormat format : {KvFormat::fp8, KvFormat::fp8nope}) {
    Rows rows(format, 4, 30);
    rows.row(2)[5] = to_bf16(kInfinity);
    for (int c = 0; c < rows.dim(); ++c) rows.row(3)[c] = to_bf16(-0.0f);
    PagedCache cache(format, 2, 2);
    QuantizeProblem problem{};
    problem.format = format;
    problem.tokens = 4;
    problem.kv = rows.row(0);
    problem.kv_stride = problem.rope_stride = rows.stride();
    problem.rope = problem.kv + rows.dim() - kRopeDim;
    problem.cache = cache.data();
    problem.pool = cache.pool();
    problem.pool.scale = 0.37f;
    std::int64_t nonfinite = -1;
    problem.nonfinite_count = &nonfinite;
    cpu::quantize(problem);
    EXPECT_EQ(nonfinite, 1);
    for (std::int64_t slot = 0; slot < 4; ++slot) {
      const auto* row = reinterpret_cast<const unsigned char*>(cache.page(slot / 2)) + slot % 2 * rows.dim();
      for (int c = 0; c < rows.dim(); ++c) {
        ASSERT_EQ(row[c], slot == 3 ? 0 : best_code(exact_quotient(to_float(rows.row(slot)[c]), 0.37f))) << c;
      }
    }
  }
}

TEST(Quantize, NoTokensAndNoPagesAreFine) {
  for (const Mode& mode : kModes) {
    Rows none(mode.format, 0, 28), some(mode.format, 2, 28);
    PagedCache cache(mode.format, 1, 2), empty(mode.format, 0, 2);
    cache.fill(0xcc);
    EXPECT_EQ(quantize(mode, none, cache), 0);
    EXPECT_EQ(cache.page(0)[0], std::byte{0xcc});
    EXPECT_EQ(quantize(mode, some, empty), 0);
    EXPECT_TRUE(empty.guards_intact());
  }
}

// ---- dequantise ----

template <typename Out>
std::vector<Out> dequantize(KvFormat format, PagedCache& cache, std::int64_t token_stride, Out filler) {
  DequantizeProblem problem{};
  problem.format = format;
  problem.cache = cache.pool();
  problem.kv_is_bf16 = sizeof(Out) == 2;
  problem.kv_stride_token = token_stride;
  problem.kv_stride_page = token_stride * cache.page_size() + 24;
  std::vector<Out> kv(static_cast<std::size_t>(problem.kv_stride_page * cache.num_pages()), filler);
  problem.kv = kv.data();
  cpu::dequantize(problem);
  return kv;
}

// Codes, scales and RoPE of any bits whatever, NaN included.
TEST(Dequantize, EqualsTheDefinitionOnRandomBytes) {
  std::mt19937 random(31);
  for (const KvFormat format : kAllFormats) {
    for (const std::int64_t page : {1, 2, 61, 64}) {
      PagedCache cache(format, 2, page, 16);
      for (std::int64_t p = 0; p < 2; ++p) {
        for (std::int64_t i = 0; i < cache.page_bytes(); ++i) cache.page(p)[i] = std::byte(random() % 254);
      }
      const int dim = key_dim(format);
      const std::int64_t stride = dim + 5;
      constexpr float kFiller = 1234.5f;
      const std::vector<float> wide = dequantize<float>(format, cache, stride, kFiller);
      const std::vector<bf16_t> narrow = dequantize<bf16_t>(format, cache, stride, to_bf16(kFiller));
      for (std::int64_t slot = 0; slot < cache.num_slots(); ++slot) {
        const std::vector<Real> key = stored_key(format, cache, slot);
        const std::int64_t begin = slot / page * (stride * page + 24) + slot % page * stride;
        for (std::int64_t c = 0; c < stride; ++c) {
          const float value = wide[static_cast<std::size_t>(begin + c)];
          const bf16_t rounded = narrow[static_cast<std::size_t>(begin + c)];
          if (c >= dim) {
            ASSERT_EQ(value, kFiller);
            ASSERT_EQ(rounded, to_bf16(kFiller));
          } else if (std::isnan(key[static_cast<std::size_t>(c)])) {
            ASSERT_TRUE(std::isnan(value));
            ASSERT_TRUE(std::isnan(to_float(rounded)));
          } else {
            ASSERT_EQ(value, static_cast<float>(key[static_cast<std::size_t>(c)]));
            ASSERT_EQ(rounded, to_bf16(value));
          }
        }
      }
      EXPECT_TRUE(cache.guards_intact());
    }
  }
}

TEST(Dequantize, QuantisingItsResultAgainChangesNoValue) {
  for (const Mode& mode : kModes) {
    if (mode.scale != ScaleMode::pow2) continue;
    Rows rows(mode.format, 40, 32);
    PagedCache once(mode.format, 4, 10), twice(mode.format, 4, 10);
    quantize(mode, rows, once);
    const std::vector<float> kv = dequantize<float>(mode.format, once, rows.dim(), 0.0f);
    for (std::int64_t token = 0; token < 40; ++token) {
      const std::size_t begin = static_cast<std::size_t>(token / 10 * (rows.dim() * 10 + 24) + token % 10 * rows.dim());
      for (std::size_t c = 0; c < static_cast<std::size_t>(rows.dim()); ++c) {
        rows.row(token)[c] = to_bf16(kv[begin + c]);
        ASSERT_EQ(to_float(rows.row(token)[c]), kv[begin + c]) << "a code times a power of two is a bf16 number";
      }
    }
    quantize(mode, rows, twice);
    EXPECT_EQ(dequantize<float>(mode.format, twice, rows.dim(), 0.0f), kv);
  }
}

}  // namespace
}  // namespace chiasma::test
