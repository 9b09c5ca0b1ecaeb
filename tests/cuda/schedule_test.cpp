// tile::Schedule is pure arithmetic, so that every cut can be walked through without a device: each block of each row
// is worked on exactly once, and the combine step finds exactly the parts that were left for it.
#include "cuda/tile/schedule.h"

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

namespace chiasma::tile {
namespace {

Schedule make(std::int32_t rows, std::int32_t blocks, std::int32_t blocks_per_unit, std::int32_t groups, bool fixed) {
  return {rows, blocks, blocks_per_unit, (blocks + blocks_per_unit - 1) / blocks_per_unit, groups, fixed};
}

// What the groups would do.
struct Walk {
  std::map<std::int32_t, std::vector<int>> times_worked_on;  // by row, per block
  std::map<std::int32_t, std::set<std::int32_t>> slots;      // by row
};

Walk walk(const Schedule& schedule) {
  Walk result;
  std::set<std::int32_t> used;
  for (std::int32_t group = 0; group < schedule.num_groups; ++group) {
    const std::int32_t end = schedule.first_unit(group + 1);
    for (std::int32_t unit = schedule.first_unit(group); unit < end;) {
      std::int32_t next = unit;
      const Piece piece = schedule.piece_at(group, unit, end, &next);
      EXPECT_GT(next, unit);
      unit = next;
      auto& blocks = result.times_worked_on[piece.row];
      blocks.resize(static_cast<std::size_t>(schedule.blocks_per_row));
      for (std::int32_t block = piece.first_block; block < piece.end_block; ++block)
        ++blocks[static_cast<std::size_t>(block)];
      if (piece.slot == Piece::kWholeRow) {
        EXPECT_EQ(piece.end_block - piece.first_block, schedule.blocks_per_row);
        continue;
      }
      EXPECT_GE(piece.slot, 0);
      EXPECT_LT(piece.slot, schedule.num_slots());
      EXPECT_TRUE(used.insert(piece.slot).second) << "two parts share slot " << piece.slot;
      result.slots[piece.row].insert(piece.slot);
    }
  }
  return result;
}

void expect_sound(const Schedule& schedule) {
  const Walk walked = walk(schedule);
  EXPECT_EQ(walked.times_worked_on.size(), static_cast<std::size_t>(schedule.num_rows));
  for (const auto& [row, blocks] : walked.times_worked_on) {
    for (const int times : blocks) ASSERT_EQ(times, 1) << "row " << row;
  }
  std::map<std::int32_t, std::set<std::int32_t>> combined;
  for (std::int32_t candidate = 0; candidate < schedule.num_candidates(); ++candidate) {
    const std::int32_t row = schedule.split_row(candidate);
    if (row < 0) continue;
    EXPECT_EQ(combined.count(row), 0u) << "row " << row << " would be merged twice";
    for (std::int32_t part = schedule.first_part(row); part <= schedule.last_part(row); ++part) {
      const std::int32_t slot = schedule.part_slot(row, part);
      if (slot >= 0) combined[row].insert(slot);
    }
  }
  EXPECT_EQ(combined, walked.slots);
}

TEST(Schedule, BalancedCutsCoverEveryBlockOnce) {
  for (const std::int32_t rows : {1, 2, 3, 7, 66, 67, 256, 1000}) {
    for (const std::int32_t blocks : {1, 2, 5, 32, 257}) {
      for (const std::int32_t unit : {1, 2, 3}) {
        for (const std::int32_t groups : {1, 2, 5, 66, 132}) {
          const Schedule schedule = make(rows, blocks, unit, groups, false);
          if (groups > schedule.num_units()) continue;
          SCOPED_TRACE(testing::Message()
                       << rows << " rows of " << blocks << " blocks, units of " << unit << ", " << groups);
          expect_sound(schedule);
        }
      }
    }
  }
}

TEST(Schedule, SharesDifferByOneUnitAtMost) {
  const Schedule schedule = make(256, 32, 1, 66, false);
  for (std::int32_t group = 0; group < 66; ++group) {
    const std::int32_t share = schedule.first_unit(group + 1) - schedule.first_unit(group);
    EXPECT_GE(share, 256 * 32 / 66);
    EXPECT_LE(share, 256 * 32 / 66 + 1);
  }
}

TEST(Schedule, FixedCutsDependOnTheRowAlone) {
  for (const std::int32_t unit : {1, 3, 11, 32}) expect_sound(make(70, 32, unit, 66, true));
  std::int32_t next = 0;
  const Piece few = make(2, 32, 8, 5, true).piece_at(0, 4, 8, &next);
  const Piece many = make(999, 32, 8, 66, true).piece_at(0, 4, 60, &next);
  EXPECT_EQ(few.first_block, many.first_block);
  EXPECT_EQ(few.end_block, many.end_block);
}

TEST(Schedule, WholeRowsNeedNoScratch) {
  const Schedule schedule = make(1000, 32, 32, 66, true);
  EXPECT_EQ(schedule.num_slots(), 0);
  EXPECT_EQ(schedule.num_candidates(), 0);
  expect_sound(schedule);
}

TEST(Schedule, ManyUnitsStayWithin32Bits) {
  const Schedule schedule = make(65536, 2048, 1, 132, false);
  EXPECT_EQ(schedule.first_unit(132), 65536 * 2048);
  for (const std::int32_t unit : {0, 1, 65536 * 2048 - 1, 65536 * 1024 + 77}) {
    const std::int32_t group = schedule.group_of(unit);
    EXPECT_LE(schedule.first_unit(group), unit);
    EXPECT_GT(schedule.first_unit(group + 1), unit);
  }
}

}  // namespace
}  // namespace chiasma::tile
