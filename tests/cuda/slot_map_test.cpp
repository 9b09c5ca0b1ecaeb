// The producers' division: exact for every slot that an index can name.
#include "cuda/sm90_sparse_fp8/slot_map.h"

#include <gtest/gtest.h>

#include <vector>

namespace chiasma::sm90_sparse_fp8 {
namespace {

constexpr std::uint32_t kMostSlot = 0x7fffffffu;

// Around the multiples of the divisor, where a quotient that is off by one shows.
void expect_exact(std::uint32_t divisor) {
  const Divider divider = Divider::make(divisor);
  const std::uint32_t last = kMostSlot / divisor;
  for (std::uint64_t quotient : {0u, 1u, 2u, last / 3, last / 2, last - (last > 0 ? 1 : 0), last}) {
    const std::uint64_t first = quotient * divisor;
    for (std::uint64_t n : {first, first + 1, first + divisor / 2, first + divisor - 1}) {
      if (n > kMostSlot) continue;
      const auto slot = static_cast<std::uint32_t>(n);
      ASSERT_EQ(divider.divide(slot), slot / divisor) << slot << " / " << divisor;
    }
  }
  ASSERT_EQ(divider.divide(kMostSlot), kMostSlot / divisor) << divisor;
}

TEST(Divider, IsExactForSmallDivisors) {
  for (std::uint32_t divisor = 1; divisor <= 5000; ++divisor) expect_exact(divisor);
}

TEST(Divider, IsExactAroundPowersOfTwo) {
  for (std::uint32_t shift = 1; shift <= 31; ++shift) {
    const std::uint32_t power = std::uint32_t{1} << shift;
    for (std::uint32_t divisor : {power - 1, power, power + 1}) {
      if (divisor <= std::uint32_t{1} << 31) expect_exact(divisor);
    }
  }
}

TEST(SlotMap, CutsWhatNoIndexReaches) {
  const SlotMap wide = SlotMap::make({nullptr, 0, 1, std::int64_t{1} << 40});
  EXPECT_EQ(wide.num_slots, 0x80000000u);
  EXPECT_EQ(wide.page_divider.divide(kMostSlot), 0u);
  const SlotMap many = SlotMap::make({nullptr, 0, std::int64_t{1} << 40, 64});
  EXPECT_EQ(many.num_slots, 0x80000000u);
  EXPECT_EQ(SlotMap::make({nullptr, 0, 0, 64}).num_slots, 0u);
  EXPECT_EQ(SlotMap::make({nullptr, 0, 3, 61}).num_slots, 183u);
}

}  // namespace
}  // namespace chiasma::sm90_sparse_fp8
