// Gathering rows of a cache: which slot each row comes from, by slots and by block table, and that nothing else is
// written. What a row's numbers are is the business of quantize_test.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>
#include <vector>

#include "cpu/cache_ops.h"
#include "tests/cpu/paged_cache.h"

namespace chiasma::test {
namespace {

constexpr std::int64_t kSmallest = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();
constexpr float kFiller = -1234.5f;

PagedCache random_cache(KvFormat format, std::int64_t num_pages, std::int64_t page) {
  PagedCache cache(format, num_pages, page, 48);
  std::mt19937 random(3);
  // Below 0x7f, so that no code, scale or bf16 is NaN.
  for (std::int64_t p = 0; p < num_pages; ++p) {
    for (std::int64_t i = 0; i < cache.page_bytes(); ++i) cache.page(p)[i] = std::byte(random() % 0x7f);
  }
  return cache;
}

// Every slot, by the operation that gather has to agree with.
std::vector<float> all_slots(KvFormat format, PagedCache& cache) {
  const std::int64_t dim = key_dim(format);
  std::vector<float> kv(static_cast<std::size_t>(cache.num_slots() * dim));
  DequantizeProblem problem{};
  problem.format = format;
  problem.cache = cache.pool();
  problem.kv = kv.data();
  problem.kv_stride_token = dim;
  problem.kv_stride_page = dim * cache.page_size();
  cpu::dequantize(problem);
  return kv;
}

// The result of a gather, with a gap behind each row.
class Gathered {
 public:
  Gathered(KvFormat format, std::int64_t rows, bool is_bf16)
      : dim_(key_dim(format)), stride_(dim_ + 3), rows_(rows), is_bf16_(is_bf16) {
    wide_.assign(static_cast<std::size_t>(rows * stride_), kFiller);
    narrow_.assign(static_cast<std::size_t>(rows * stride_), to_bf16(kFiller));
  }

  void point(GatherProblem* problem) {
    problem->rows = rows_;
    problem->kv = is_bf16_ ? static_cast<void*>(narrow_.data()) : wide_.data();
    problem->kv_is_bf16 = is_bf16_;
    problem->kv_stride = stride_;
  }

  // slots: of the rows that must have been written; all others, and the gaps, must not.
  void expect_rows(const std::map<std::int64_t, std::int64_t>& slots, const std::vector<float>& all,
                   std::int64_t num_slots) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      const auto found = slots.find(row);
      for (std::int64_t c = 0; c < stride_; ++c) {
        float expected = kFiller;
        if (found != slots.end() && c < dim_) {
          const bool exists = found->second >= 0 && found->second < num_slots;
          expected = exists ? all[static_cast<std::size_t>(found->second * dim_ + c)] : 0.0f;
        }
        const auto at = static_cast<std::size_t>(row * stride_ + c);
        if (is_bf16_) {
          ASSERT_EQ(narrow_[at], to_bf16(expected)) << "row " << row << " column " << c;
        } else {
          ASSERT_EQ(wide_[at], expected) << "row " << row << " column " << c;
        }
      }
    }
  }

 private:
  std::int64_t dim_, stride_, rows_;
  bool is_bf16_;
  std::vector<float> wide_;
  std::vector<bf16_t> narrow_;
};

template <typename Integer>
IntegerView view_of(const std::vector<Integer>& numbers, std::int64_t stride = 1) {
  return {numbers.data(), sizeof(Integer) == 8, stride};
}

TEST(Gather, BySlotsInEveryFormat) {
  for (const KvFormat format : kAllFormats) {
    for (const bool is_bf16 : {false, true}) {
      PagedCache cache = random_cache(format, 3, 61);
      const std::vector<float> all = all_slots(format, cache);
      // Every second number counts.
      const std::vector<std::int64_t> slots = {182, 9, 0, 9, -1, 9, 60, 9, 61, 9, 183, 9, kLargest, 9, kSmallest, 9, 0};
      std::map<std::int64_t, std::int64_t> expected;
      for (std::size_t row = 0; 2 * row < slots.size(); ++row) {
        expected[static_cast<std::int64_t>(row)] = slots[2 * row];
      }
      Gathered result(format, static_cast<std::int64_t>(expected.size()), is_bf16);
      GatherProblem problem{};
      problem.format = format;
      problem.cache = cache.pool();
      problem.slots = view_of(slots, 2);
      result.point(&problem);
      cpu::gather_dequantize(problem);
      result.expect_rows(expected, all, cache.num_slots());
      if (HasFatalFailure()) FAIL() << format_name(format);
      EXPECT_TRUE(cache.guards_intact());
    }
  }
}

TEST(Gather, BySlotsOfInt32) {
  PagedCache cache = random_cache(KvFormat::v32, 2, 64);
  const std::vector<float> all = all_slots(KvFormat::v32, cache);
  const std::vector<std::int32_t> slots = {127, -1, 128, 64, std::numeric_limits<std::int32_t>::max()};
  Gathered result(KvFormat::v32, 5, false);
  GatherProblem problem{};
  problem.format = KvFormat::v32;
  problem.cache = cache.pool();
  problem.slots = view_of(slots);
  result.point(&problem);
  cpu::gather_dequantize(problem);
  result.expect_rows({{0, 127}, {1, -1}, {2, 128}, {3, 64}, {4, -1}}, all, cache.num_slots());
}

// A block table of requests with lengths and starts, and the rows that come of it by the definition.
struct TableCase {
  std::int64_t page = 4, max_pages = 3, rows = 40;
  std::vector<std::int32_t> table;  // [b, max_pages], one number apart from the next row
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> starts;

  std::map<std::int64_t, std::int64_t> expected_rows(std::int64_t num_pages) const {
    std::map<std::int64_t, std::int64_t> rows_of;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      for (std::int64_t t = 0; t < std::min<std::int64_t>(lengths[i], max_pages * page); ++t) {
        if (starts[i] >= rows) continue;  // where a sum might overflow
        const std::int64_t row = starts[i] + t;
        if (row < 0 || row >= rows) continue;
        const std::int64_t entry =
            table[i * static_cast<std::size_t>(max_pages + 1) + static_cast<std::size_t>(t / page)];
        rows_of[row] = entry < 0 || entry >= num_pages ? -1 : entry * page + t % page;
      }
    }
    return rows_of;
  }
};

void expect_table_rows(const TableCase& given, std::int64_t num_pages, bool wide_starts) {
  PagedCache cache = random_cache(KvFormat::v4, num_pages, given.page);
  const std::vector<float> all = all_slots(KvFormat::v4, cache);
  const std::vector<std::int32_t> narrow(given.starts.begin(), given.starts.end());
  Gathered result(KvFormat::v4, given.rows, true);
  GatherProblem problem{};
  problem.format = KvFormat::v4;
  problem.cache = cache.pool();
  problem.b = static_cast<std::int64_t>(given.lengths.size());
  problem.max_pages = given.max_pages;
  problem.block_table = given.table.data();
  problem.block_table_stride = given.max_pages + 1;
  problem.seq_lens = given.lengths.data();
  problem.seq_lens_stride = 1;
  problem.starts = wide_starts ? view_of(given.starts) : view_of(narrow);
  result.point(&problem);
  cpu::gather_dequantize(problem);
  result.expect_rows(given.expected_rows(num_pages), all, cache.num_slots());
}

TEST(Gather, ByBlockTable) {
  TableCase given;
  given.table = {4, 0, 2, 99, 1, -1, 3, 99, 5, 1000000, 0, 99};  // pages that are none: -1, 5 and a million
  given.lengths = {9, 12, 12};
  given.starts = {2, 11, 25};
  for (const bool wide : {false, true}) expect_table_rows(given, 5, wide);
}

TEST(Gather, LengthsAreClampedToTheTable) {
  TableCase given;
  given.table = {0, 1, 2, 99, 2, 1, 0, 99, 1, 1, 1, 99};
  given.lengths = {std::numeric_limits<std::int32_t>::max(), -5, 13};
  given.starts = {0, 12, 24};
  expect_table_rows(given, 3, false);
}

TEST(Gather, RowsOutsideAreNotWritten) {
  TableCase given;
  given.table.assign(8 * 4, 1);
  given.lengths.assign(8, 12);
  given.starts = {-5, 35, -12, 40, kSmallest, kLargest, -kLargest, -13};
  expect_table_rows(given, 2, true);
}

TEST(Gather, EmptyTablesRowsAndCachesAreFine) {
  TableCase no_pages;
  no_pages.max_pages = 0;
  no_pages.table = {99};
  no_pages.lengths = {7};
  no_pages.starts = {0};
  expect_table_rows(no_pages, 2, false);
  TableCase no_cache;
  no_cache.table = {0, 1, 2, 99};
  no_cache.lengths = {12};
  no_cache.starts = {3};
  expect_table_rows(no_cache, 0, false);
  TableCase no_rows = no_cache;
  no_rows.rows = 0;
  expect_table_rows(no_rows, 2, true);
}

// Long enough that threads share the tokens.
TEST(Gather, ManyTokens) {
  TableCase given;
  given.page = 61;
  given.max_pages = 20;
  given.rows = 1500;
  std::mt19937 random(5);
  for (int n = 0; n < 2 * 21; ++n) given.table.push_back(static_cast<std::int32_t>(random() % 12) - 1);
  given.lengths = {611, 1220};
  given.starts = {0, 611};
  expect_table_rows(given, 10, true);
}

}  // namespace
}  // namespace chiasma::test
