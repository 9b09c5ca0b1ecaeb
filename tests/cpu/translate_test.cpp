// Translation of tokens to slots, against the definition: a list that deals out every token of a request, one after the
// other, to ranks and pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "cpu/cache_ops.h"

namespace chiasma::test {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

struct Rule {
  std::int64_t page = 1, max_pages = 0;
  std::int64_t world = 1, rank = 0, interleave = 1;
};

// Slots of all tokens that have one. Tokens are dealt out in runs, and each rank numbers its own.
std::map<std::int64_t, std::int64_t> slots_of_request(const Rule& rule, const std::int32_t* pages) {
  std::map<std::int64_t, std::int64_t> slots;
  std::int64_t own = 0, rank = 0, in_run = 0;
  for (std::int64_t token = 0; own < rule.max_pages * rule.page; ++token) {
    if (rank == rule.rank) {
      const std::int64_t page = pages[own / rule.page];
      const std::int64_t slot = page * rule.page + own % rule.page;
      if (page >= 0 && slot <= kMaxInt32) slots[token] = slot;
      ++own;
    }
    if (++in_run == rule.interleave) {
      in_run = 0;
      rank = (rank + 1) % rule.world;
    }
  }
  return slots;
}

std::int32_t slot_or_none(const std::map<std::int64_t, std::int64_t>& slots, std::int64_t token) {
  const auto found = slots.find(token);
  return found == slots.end() ? -1 : static_cast<std::int32_t>(found->second);
}

// [b, s_q, topk] with gaps.
constexpr std::int64_t kB = 3, kSq = 2, kTopk = 500;
constexpr std::int64_t kStrideS = kTopk + 3, kStrideB = kSq * kStrideS + 5;
constexpr std::int32_t kFiller = -77;

template <typename Index>
class Translation {
 public:
  explicit Translation(const Rule& rule)
      : rule_(rule), indices_(kB * kStrideB, Index{-9}), slots_(kB * kStrideB, kFiller) {
    std::mt19937_64 random(17);
    for (std::int64_t n = 0; n < kRequests * (rule.max_pages + 1); ++n) {
      const auto any = static_cast<std::int32_t>(random() % 1000);
      // Some are no page, some have slots on both sides of what int32 holds.
      const std::int64_t edge = std::min(kMaxInt32, kMaxInt32 / rule.page + any % 3);
      table_.push_back(any % 10 == 0 ? -1 - any : any % 10 == 1 ? static_cast<std::int32_t>(edge) : any);
    }
    // Every token once with what is around them, and numbers of any size.
    const std::int64_t tokens = (rule.max_pages * rule.page + rule.interleave) * rule.world;
    for (std::int64_t row = 0; row < kB * kSq; ++row) {
      for (std::int64_t i = 0; i < kTopk; ++i) {
        const auto chosen = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(tokens + 8)) - 4;
        at(indices_, row)[i] = i % 7 == 0 ? static_cast<Index>(random()) : static_cast<Index>(chosen);
      }
    }
    at(indices_, 0)[0] = std::numeric_limits<Index>::min();
    at(indices_, 0)[1] = std::numeric_limits<Index>::max();
  }

  void run(bool in_place) {
    TranslateProblem problem{};
    problem.b = kB;
    problem.s_q = kSq;
    problem.topk = kTopk;
    problem.indices = in_place ? static_cast<const void*>(slots_.data()) : indices_.data();
    problem.indices_are_int64 = !in_place && sizeof(Index) == 8;
    problem.indices_stride_b = problem.slots_stride_b = kStrideB;
    problem.indices_stride_s = problem.slots_stride_s = kStrideS;
    problem.slots = slots_.data();
    problem.block_table = table_.data();
    problem.requests = kRequests;
    problem.max_pages = rule_.max_pages;
    problem.block_table_stride = rule_.max_pages + 1;
    problem.request = request_;
    problem.request_stride = 2;
    problem.page_size = rule_.page;
    problem.cp_world = rule_.world;
    problem.cp_rank = rule_.rank;
    problem.cp_interleave = rule_.interleave;
    if (in_place) std::copy(indices_.begin(), indices_.end(), slots_.begin());
    cpu::translate_indices(problem);
  }

  void expect_slots(std::int32_t gap_filler) const {
    std::vector<std::int32_t> expected(slots_.size(), gap_filler);
    for (std::int64_t row = 0; row < kB * kSq; ++row) {
      const std::int32_t request = request_[row / kSq * 2];
      std::map<std::int64_t, std::int64_t> known;
      if (request >= 0 && request < kRequests) {
        known = slots_of_request(rule_, table_.data() + request * (rule_.max_pages + 1));
      }
      for (std::int64_t i = 0; i < kTopk; ++i) at(expected, row)[i] = slot_or_none(known, at(indices_, row)[i]);
    }
    ASSERT_EQ(slots_, expected);
  }

 private:
  static constexpr std::int64_t kRequests = 2;
  template <typename Numbers>
  static auto at(Numbers& numbers, std::int64_t row) {
    return numbers.data() + row / kSq * kStrideB + row % kSq * kStrideS;
  }

  Rule rule_;
  std::int32_t request_[2 * kB] = {1, 9, 0, 9, 2, 9};  // the last is none
  std::vector<std::int32_t> table_;
  std::vector<Index> indices_;
  std::vector<std::int32_t> slots_;
};

const Rule kRules[] = {
    {.page = 64, .max_pages = 5},
    {.page = 1, .max_pages = 40},
    {.page = 61, .max_pages = 7, .world = 2, .rank = 1},
    {.page = 64, .max_pages = 3, .world = 4, .rank = 3, .interleave = 16},
    {.page = 7, .max_pages = 9, .world = 3, .rank = 0, .interleave = 5},
    {.page = 64, .max_pages = 2, .world = 8, .rank = 2, .interleave = 100},
    {.page = 64, .max_pages = 0, .world = 2, .rank = 1},
};

TEST(Translate, EqualsTheDefinition) {
  for (const Rule& rule : kRules) {
    Translation<std::int32_t> narrow(rule);
    narrow.run(false);
    narrow.expect_slots(kFiller);
    Translation<std::int64_t> wide(rule);
    wide.run(false);
    wide.expect_slots(kFiller);
  }
}

TEST(Translate, InPlaceGivesTheSame) {
  for (const Rule& rule : kRules) {
    Translation<std::int32_t> translation(rule);
    translation.run(true);
    translation.expect_slots(-9);
  }
}

TEST(Translate, WithoutATableNumbersAreNarrowed) {
  const std::vector<std::int64_t> indices = {0,
                                             5,
                                             -1,
                                             kMaxInt32,
                                             kMaxInt32 + 1,
                                             std::numeric_limits<std::int64_t>::min(),
                                             std::numeric_limits<std::int64_t>::max()};
  std::vector<std::int32_t> slots(indices.size(), kFiller);
  TranslateProblem problem{};
  problem.b = problem.s_q = 1;
  problem.topk = static_cast<std::int64_t>(indices.size());
  problem.indices = indices.data();
  problem.indices_are_int64 = true;
  problem.slots = slots.data();
  problem.page_size = problem.cp_world = problem.cp_interleave = 1;
  cpu::translate_indices(problem);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 5, -1, static_cast<std::int32_t>(kMaxInt32), -1, -1, -1}));
}

// A token that 31 bits do not hold, in a table that reaches so far.
TEST(Translate, TokensBeyondInt32) {
  constexpr std::int64_t kPage = kMaxInt32;
  const std::int32_t table[] = {-1, -1, 0};
  const std::vector<std::int64_t> indices = {2 * kPage, 2 * kPage + 5, 3 * kPage - 1, 3 * kPage, 2 * kPage - 1};
  std::vector<std::int32_t> slots(indices.size(), kFiller);
  TranslateProblem problem{};
  problem.b = problem.s_q = 1;
  problem.topk = static_cast<std::int64_t>(indices.size());
  problem.indices = indices.data();
  problem.indices_are_int64 = true;
  problem.slots = slots.data();
  problem.block_table = table;
  problem.requests = 1;
  problem.max_pages = 3;
  problem.page_size = kPage;
  problem.cp_world = problem.cp_interleave = 1;
  cpu::translate_indices(problem);
  EXPECT_EQ(slots, (std::vector<std::int32_t>{0, 5, static_cast<std::int32_t>(kPage - 1), -1, -1}));
}

}  // namespace
}  // namespace chiasma::test
