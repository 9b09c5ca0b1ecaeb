// The arithmetic of `chiasma budget`, and the budgets themselves as far as no GPU is needed.
#include "cli/budget.h"

#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <string>

#include "cuda/sm90_sparse_fp8/budget.h"
#include "cuda/sm90_sparse_fp8_direct/budget.h"

namespace chiasma::cli {
namespace {

using tile::Need;
using tile::Resource;

double total_amount(std::span<const Need> needs, Resource resource) {
  double sum = 0;
  for (const Need& need : needs) sum += need.resource == resource ? need.amount : 0;
  return sum;
}

TEST(Budget, NeedsOfOneResourceAddUpAndTheBusiestComesFirst) {
  const Need needs[] = {{"a", Resource::kMatrix, 4096, "matrix"},
                        {"b", Resource::kShared, 1280, "load"},
                        {"c", Resource::kShared, 640, "store"},
                        {"d", Resource::kExchange, 0, "not measured"}};
  const std::map<std::string, double, std::less<>> rates = {{"matrix", 1024}, {"load", 128}, {"store", 64}};
  const Budget budget = make_budget(needs, [&](std::string_view id) { return rates.find(id)->second; });
  ASSERT_EQ(budget.lines.size(), 3u);
  EXPECT_DOUBLE_EQ(budget.lines[0].clk, 4);
  EXPECT_DOUBLE_EQ(budget.lines[2].clk, 10);
  ASSERT_EQ(budget.resources.size(), 2u);
  EXPECT_EQ(budget.resources[0].resource, Resource::kShared);
  EXPECT_DOUBLE_EQ(budget.resources[0].clk, 20);
  EXPECT_DOUBLE_EQ(budget.resources[1].clk, 4);
}

TEST(Budget, ANeedWithoutAFigureIsAnError) {
  const Need needs[] = {{"a", Resource::kMatrix, 1, "nobody measured this"}};
  try {
    make_budget(needs, [](std::string_view) { return 0.0; });
    FAIL();
  } catch (const std::out_of_range& error) {
    EXPECT_NE(std::string(error.what()).find("nobody measured this"), std::string::npos);
  }
}

TEST(Budget, BlocksAndClocks) {
  harness::Case spec;
  spec.b = 33;
  spec.sq = 2;
  spec.h = 128;
  spec.topk = 65;  // two blocks
  EXPECT_DOUBLE_EQ(blocks_per_multiprocessor(spec, 132), 2);
  spec.h = 65;  // two groups of heads
  EXPECT_DOUBLE_EQ(blocks_per_multiprocessor(spec, 132), 2);
  spec.h = 64;
  EXPECT_DOUBLE_EQ(blocks_per_multiprocessor(spec, 132), 1);
  EXPECT_DOUBLE_EQ(clk_per_block(100, 1500, 30), 5000);
}

// What crossover is: half of the rows gathered and converted, the other half from the peer, the products unchanged.
TEST(Budget, CrossoverHalvesGatherAndConversionAndAddsTheExchange) {
  const auto crossover = sm90_sparse_fp8::kCrossoverNeeds;
  const auto baseline = sm90_sparse_fp8::kBaselineNeeds;
  for (const Resource resource : {Resource::kGather, Resource::kConvert}) {
    EXPECT_DOUBLE_EQ(2 * total_amount(crossover, resource), total_amount(baseline, resource));
  }
  for (const Resource resource : {Resource::kMatrix, Resource::kExp2, Resource::kMemory}) {
    EXPECT_DOUBLE_EQ(total_amount(crossover, resource), total_amount(baseline, resource));
  }
  EXPECT_DOUBLE_EQ(total_amount(baseline, Resource::kExchange), 0);
  EXPECT_DOUBLE_EQ(total_amount(crossover, Resource::kExchange), 32 * 576 * 2);
  EXPECT_DOUBLE_EQ(total_amount(baseline, Resource::kMatrix), 64.0 * 64 * (576 + 512) * 2);
  EXPECT_DOUBLE_EQ(total_amount(baseline, Resource::kGather), 64 * 656);
}

// Counted by hand: QK reads two operands of 64 rows 36 times; PV reads V once and P once for each 128 columns of the
// warpgroup that lacks it.
TEST(Budget, SharedMemoryOfTheProducts) {
  EXPECT_DOUBLE_EQ(sm90_sparse_fp8::kQkSharedBytes, 36 * 2 * 2048);
  EXPECT_DOUBLE_EQ(sm90_sparse_fp8::kPvSharedBytes, 64 * 512 * 2 + 2 * 64 * 64 * 2);
}

// The kernel without tiles multiplies the same, converts every row twice (once for K, once for V) and exchanges
// nothing.
TEST(Budget, DirectConvertsTwiceAndMultipliesTheSame) {
  const auto direct = sm90_sparse_fp8_direct::kNeeds;
  const auto baseline = sm90_sparse_fp8::kBaselineNeeds;
  for (const Resource resource : {Resource::kMatrix, Resource::kExp2, Resource::kMemory, Resource::kGather}) {
    EXPECT_DOUBLE_EQ(total_amount(direct, resource), total_amount(baseline, resource));
  }
  EXPECT_DOUBLE_EQ(total_amount(direct, Resource::kConvert), 2 * 64 * 512);
  EXPECT_DOUBLE_EQ(total_amount(direct, Resource::kExchange), 0);
  // Rows in, K and V out; q 36 times and P 32 times at 2 KB; P in; sums in and out.
  EXPECT_DOUBLE_EQ(total_amount(direct, Resource::kShared),
                   64 * (656 + 640 + 512) + (36 + 32) * 2048 + 64 * 64 * 2 + 2 * 64 / 8 * 128 * 8);
}

}  // namespace
}  // namespace chiasma::cli
