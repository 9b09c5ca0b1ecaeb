// Split-KV scheduling as pure arithmetic: which blocks of which query tokens a group of thread blocks works on. Host
// and device compute the same answer from a few integers, so that no scheduling kernel and no metadata exist.
//
// The rows (query tokens) are laid end to end and cut into units of blocks. Each group takes an equal, contiguous range
// of units. A run of units of one row within one group is a piece; a piece that is less than its row leaves a partial
// result in a slot of the scratch memory, and the combine step merges the slots of a row. 32-bit integers throughout,
// for the device's sake: the planner sees to it that num_rows * units_per_row stays below 2^31.
#pragma once

#include <cstdint>

#include "format/kv_format.h"

namespace chiasma::tile {

struct Piece {
  std::int32_t row;
  std::int32_t first_block, end_block;  // before the row's own length is looked at
  std::int32_t slot;                    // of the partial result; kWholeRow if the piece is the row
  static constexpr std::int32_t kWholeRow = -1;
};

struct Schedule {
  std::int32_t num_rows;
  std::int32_t blocks_per_row;  // >= 1, also for topk 0
  std::int32_t blocks_per_unit;
  std::int32_t units_per_row;
  std::int32_t num_groups;
  // Fixed: every unit is a piece of its own, so that how a row is cut depends on nothing else in the batch.
  // Otherwise neighbouring units of a row merge into one piece, and at most two pieces a group are partial.
  bool fixed_units;

  CHIASMA_HOST_DEVICE constexpr std::int32_t num_units() const { return num_rows * units_per_row; }
  CHIASMA_HOST_DEVICE constexpr std::int32_t first_unit(std::int32_t group) const {
    return num_units() / num_groups * group + num_units() % num_groups * group / num_groups;
  }
  CHIASMA_HOST_DEVICE constexpr std::int32_t group_of(std::int32_t unit) const {
    // first_unit() is floor(num_units * group / num_groups); this is the last group with that <= unit.
    return static_cast<std::int32_t>(((std::int64_t{unit} + 1) * num_groups - 1) / num_units());
  }

  // The piece that starts at `unit` within a group's range that ends at end_unit; *next_unit is where the following one
  // starts.
  CHIASMA_HOST_DEVICE constexpr Piece piece_at(std::int32_t group, std::int32_t unit, std::int32_t end_unit,
                                               std::int32_t* next_unit) const {
    const std::int32_t row = unit / units_per_row;
    const std::int32_t first = unit - row * units_per_row;
    std::int32_t end = units_per_row;
    if (fixed_units) {
      end = first + 1;
    } else if (end_unit - unit < units_per_row - first) {
      end = first + (end_unit - unit);
    }
    *next_unit = unit + (end - first);
    Piece piece{row, first * blocks_per_unit, end * blocks_per_unit, Piece::kWholeRow};
    if (piece.end_block > blocks_per_row) piece.end_block = blocks_per_row;
    const bool is_whole = first == 0 && end == units_per_row;
    if (!is_whole) piece.slot = fixed_units ? unit : 2 * group + (first == 0 ? 1 : 0);
    return piece;
  }

  CHIASMA_HOST_DEVICE constexpr std::int32_t num_slots() const {
    if (units_per_row == 1) return 0;
    return fixed_units ? num_units() : 2 * num_groups;
  }

  // How the combine step finds its work: candidate k names a row, or -1 where there is nothing to merge for it. There
  // are as many as rows or, where that is fewer, as places where a group's range ends and another begins.
  CHIASMA_HOST_DEVICE constexpr std::int32_t num_candidates() const {
    if (units_per_row == 1) return 0;
    return candidates_are_rows() ? num_rows : num_groups - 1;
  }
  CHIASMA_HOST_DEVICE constexpr std::int32_t split_row(std::int32_t candidate) const {
    if (fixed_units) return candidate;
    if (candidates_are_rows()) return first_part(candidate) < last_part(candidate) ? candidate : -1;
    // A row is split where a group's range begins inside it; the first such group speaks for the row.
    const std::int32_t begin = first_unit(candidate + 1);
    const std::int32_t row = begin / units_per_row;
    const bool begins_inside = begin % units_per_row != 0 && begin < num_units();
    const bool is_first = first_unit(candidate) <= row * units_per_row;
    return begins_inside && is_first ? row : -1;
  }
  // Parts of a split row, in the order of its blocks.
  CHIASMA_HOST_DEVICE constexpr std::int32_t first_part(std::int32_t row) const {
    return fixed_units ? row * units_per_row : group_of(row * units_per_row);
  }
  CHIASMA_HOST_DEVICE constexpr std::int32_t last_part(std::int32_t row) const {
    return fixed_units ? (row + 1) * units_per_row - 1 : group_of((row + 1) * units_per_row - 1);
  }
  // Slot of a part, or -1 for a group without units.
  CHIASMA_HOST_DEVICE constexpr std::int32_t part_slot(std::int32_t row, std::int32_t part) const {
    if (fixed_units) return part;
    if (first_unit(part) == first_unit(part + 1)) return -1;
    return 2 * part + (first_unit(part) <= row * units_per_row ? 1 : 0);
  }

 private:
  CHIASMA_HOST_DEVICE constexpr bool candidates_are_rows() const { return fixed_units || num_rows < num_groups; }
};

}  // namespace chiasma::tile
