// The model that chooses heads and parts, with the constants of a kernel much like the real ones.
#include "cuda/split_cost.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "api/validate.h"
#include "tests/cuda/hopper_plan.h"

namespace chiasma {
namespace {

constexpr KernelCost kCost = {{{{8, 6.0, 1.2, 2.0}, {16, 7.0, 1.3, 3.0}, {32, 8.0, 1.6, 4.0}, {64, 10.0, 2.3, 7.0}}},
                              2.4};

// What a request asks for, and the cut that it gets.
struct Planned {
  DecodeProblem problem{};
  chiasma_device_info device = hopper();
  PlanRequest request;
  Cut cut;

  explicit Planned(const Shape& shape, bool batch_invariant = false, int num_splits = 0)
      : request{problem, device, batch_invariant, num_splits, 0}, cut{} {
    const chiasma_decode_args args = args_of(shape);
    EXPECT_TRUE(validate_decode(&args, DataCheck::shapes_only, &problem).ok());
    cut = choose_cut(request, kCost);
  }
  Planned(const Planned&) = delete;

  const HeadCost& heads() const { return full_heads(kCost, cut.shape.heads_per_block); }
  double us() const { return estimate_us(request, cut.schedule, heads(), kCost); }
  int thread_blocks() const { return cut.schedule.num_groups * cut.shape.blocks_per_group; }
};

TEST(SplitCost, FullHeadsHoldAllOrAreTheMostThereAre) {
  EXPECT_EQ(full_heads(kCost, 1).heads, 8);
  EXPECT_EQ(full_heads(kCost, 8).heads, 8);
  EXPECT_EQ(full_heads(kCost, 9).heads, 16);
  EXPECT_EQ(full_heads(kCost, 33).heads, 64);
  EXPECT_EQ(full_heads(kCost, 128).heads, 64);
}

TEST(SplitCost, EveryShapeHasAPlanThatFitsTheDevice) {
  for (const std::int64_t b : {1, 2, 5, 31, 66, 67, 133, 1000, 65536}) {
    for (const std::int64_t s_q : {1, 2, 7}) {
      for (const std::int64_t h_q : {1, 8, 9, 16, 40, 64, 96, 128}) {
        for (const std::int64_t topk : {0, 1, 64, 2048, 2051, 131072}) {
          if (b * s_q * topk > std::int64_t{INT32_MAX} * kScheduledTokens / 2) continue;
          SCOPED_TRACE(testing::Message() << "b " << b << " s_q " << s_q << " h_q " << h_q << " topk " << topk);
          const Planned planned({b, s_q, h_q, topk});
          const tile::Schedule& schedule = planned.cut.schedule;
          ASSERT_TRUE(std::isfinite(planned.us()));
          ASSERT_EQ(schedule.num_rows, b * s_q);
          ASSERT_GE(planned.cut.shape.blocks_per_group * planned.cut.shape.heads_per_block, h_q);
          ASSERT_LE(planned.cut.shape.heads_per_block, full_heads(kCost, static_cast<int>(h_q)).heads);
          ASSERT_LE(planned.thread_blocks(), 132);
          ASSERT_GE(schedule.units_per_row * schedule.blocks_per_unit, schedule.blocks_per_row);
        }
      }
    }
  }
}

// But for a little: shares that end where rows end leave fewer parts than those of a row less.
TEST(SplitCost, MoreWorkNeverTakesLess) {
  constexpr double kLuck = 0.9;
  for (const std::int64_t h_q : {8, 16, 64, 128}) {
    double before = 0;
    for (std::int64_t b = 1; b <= 300; ++b) {
      const double us = Planned({b, 1, h_q, 2048}).us();
      EXPECT_GE(us, kLuck * before) << "b " << b << " h_q " << h_q;
      before = std::max(before, us);
    }
    before = 0;
    for (std::int64_t topk = 64; topk <= 32768; topk *= 2) {
      const double us = Planned({4, 1, h_q, topk}).us();
      EXPECT_GE(us, before) << "topk " << topk << " h_q " << h_q;
      before = us;
    }
  }
}

// At the least a few more thread blocks than with all heads in one, which left half of the device idle.
TEST(SplitCost, SmallBatchesKeepMostOfTheDeviceBusy) {
  for (const std::int64_t b : {1, 2, 4, 8, 16}) EXPECT_GE(Planned({b, 1, 128, 2048}).thread_blocks(), 120) << b;
  EXPECT_LT(Planned({1, 1, 128, 2048}).cut.shape.heads_per_block, 64);
  EXPECT_EQ(Planned({128, 1, 128, 2048}).cut.shape.heads_per_block, 64);
}

TEST(SplitCost, NoOtherChoiceIsEstimatedToBeFaster) {
  for (const std::int64_t b : {1, 3, 16, 40, 148}) {
    const Planned planned({b, 2, 128, 4096});
    for (const HeadCost& heads : kCost.heads) {
      const GroupShape shape{128 / heads.heads, heads.heads, false};
      for (const std::int32_t parts : {kPartsAnywhere, 1}) {
        const tile::Schedule schedule = make_schedule(planned.request, shape, parts);
        EXPECT_LE(planned.us(), estimate_us(planned.request, schedule, heads, kCost)) << b << " " << heads.heads;
      }
    }
  }
}

// The bits of a row must not depend on the batch, and the cut decides on the bits.
TEST(SplitCost, BatchInvariantAndGivenPartsTakeNoNoticeOfTheBatch) {
  for (const std::int64_t h_q : {5, 16, 128}) {
    for (const std::int64_t b : {1, 3, 66, 500}) {
      const Planned invariant({b, 1, h_q, 2048}, true);
      EXPECT_EQ(invariant.cut.shape.heads_per_block, full_heads(kCost, static_cast<int>(h_q)).heads);
      EXPECT_EQ(invariant.cut.schedule.units_per_row, 1);
      const Planned given({b, 1, h_q, 2048}, false, 5);
      EXPECT_EQ(given.cut.shape.heads_per_block, full_heads(kCost, static_cast<int>(h_q)).heads);
      EXPECT_TRUE(given.cut.schedule.fixed_units);
      EXPECT_EQ(given.cut.schedule.blocks_per_unit, 7);
    }
  }
}

TEST(SplitCost, AnEmptyBatchHasAPlanToo) {
  EXPECT_EQ(Planned({0, 1, 128, 2048}).cut.schedule.num_rows, 0);
}

}  // namespace
}  // namespace chiasma
