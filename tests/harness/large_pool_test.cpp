// Pools far beyond 2^31 bytes, 2^32 rows' worth of page stride and slots up to the end of int32, as sparse mappings of
// which only the rows in use exist.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "format/kv_format.h"
#include "harness/host_buffer.h"
#include "harness/workload.h"

namespace chiasma::harness {
namespace {

constexpr std::int64_t kHeads = 8;

struct Pool {
  std::int64_t num_pages, page, page_stride;
  std::vector<std::int32_t> slots;  // that are in use
};

struct Result {
  std::vector<std::uint16_t> out = std::vector<std::uint16_t>(kHeads * kValueDim);
  std::vector<float> lse = std::vector<float>(kHeads);
};

// Decodes over rows that a small workload provides, placed in the pool's slots in order.
void decode_over(const Workload& source, const Pool& pool, const std::byte* memory, Result* result) {
  const chiasma_device cpu = {CHIASMA_CPU, 0};
  chiasma_decode_args args = source.args();
  const std::int64_t cache_shape[] = {pool.num_pages, pool.page, v32::kRowBytes};
  // The interface takes const memory too: decode never writes to it.
  args.kv_cache = chiasma_contiguous(const_cast<std::byte*>(memory), CHIASMA_UINT8, cpu, 3, cache_shape);
  args.kv_cache.stride[0] = pool.page_stride;
  std::vector<std::int32_t> indices = pool.slots;
  const std::int64_t indices_shape[] = {1, 1, static_cast<std::int64_t>(indices.size())};
  args.indices = chiasma_contiguous(indices.data(), CHIASMA_INT32, cpu, 3, indices_shape);
  const std::int64_t out_shape[] = {1, 1, kHeads, kValueDim};
  const std::int64_t lse_shape[] = {1, 1, kHeads};
  args.out = chiasma_contiguous(result->out.data(), CHIASMA_BFLOAT16, cpu, 4, out_shape);
  args.lse = chiasma_contiguous(result->lse.data(), CHIASMA_FLOAT32, cpu, 3, lse_shape);

  chiasma_decode_plan* plan = nullptr;
  ASSERT_EQ(chiasma_decode_plan_create(&args, nullptr, &plan), CHIASMA_OK) << chiasma_last_error();
  const std::size_t bytes = chiasma_decode_plan_workspace_bytes(plan);
  const HostBuffer workspace(std::max<std::size_t>(1, bytes));
  EXPECT_EQ(chiasma_decode_run(plan, &args, workspace.data(), bytes, nullptr), CHIASMA_OK) << chiasma_last_error();
  chiasma_decode_plan_destroy(plan);

  std::vector<double> oracle_out(kHeads * kValueDim), oracle_lse(kHeads);
  ASSERT_EQ(chiasma_decode_oracle(&args, nullptr, 1, oracle_out.data(), oracle_lse.data(), nullptr, nullptr),
            CHIASMA_OK)
      << chiasma_last_error();
  for (std::size_t head = 0; head < kHeads; ++head) EXPECT_NEAR(result->lse[head], oracle_lse[head], 1e-4);
}

// The same rows in a pool like `pool` and in a small one give the same bits.
void expect_same_as_small(const Pool& pool) {
  Case spec;
  std::string error;
  const std::string topk = std::to_string(pool.slots.size());
  ASSERT_TRUE(parse_case("decode b=1 h=8 page=1 scale=amax pool=" + topk + " topk=" + topk, &spec, &error)) << error;
  const std::unique_ptr<Workload> source = Workload::make(spec, &error);
  ASSERT_NE(source, nullptr) << error;
  const auto* rows = static_cast<const std::byte*>(source->args().kv_cache.data);
  const std::vector<std::int64_t> source_slots = selected_slots(source->args(), 0, false);

  const HostBuffer memory(static_cast<std::size_t>(pool.num_pages * pool.page_stride));
  if (memory.data() == nullptr) GTEST_SKIP() << "this system grants no sparse mapping of that size";
  Pool small = {static_cast<std::int64_t>(pool.slots.size()), 1, v32::kRowBytes, {}};
  std::vector<std::byte> small_memory(static_cast<std::size_t>(small.num_pages * small.page_stride));
  for (std::size_t n = 0; n < pool.slots.size(); ++n) {
    const std::int64_t slot = pool.slots[n];
    const std::byte* row = rows + source_slots[n] * v32::kRowBytes;
    std::memcpy(memory.data() + slot / pool.page * pool.page_stride + slot % pool.page * v32::kRowBytes, row,
                v32::kRowBytes);
    std::memcpy(small_memory.data() + n * v32::kRowBytes, row, v32::kRowBytes);
    small.slots.push_back(static_cast<std::int32_t>(n));
  }
  Result large_result, small_result;
  decode_over(*source, pool, memory.data(), &large_result);
  decode_over(*source, small, small_memory.data(), &small_result);
  EXPECT_EQ(large_result.out, small_result.out);
  EXPECT_EQ(large_result.lse, small_result.lse);
}

TEST(LargePool, BeyondTwoToThe32Bytes) {
  constexpr std::int64_t kPage = 64;
  constexpr std::int64_t kPageBytes = kPage * v32::kRowBytes;
  Pool pool = {(std::int64_t{5} << 30) / kPageBytes, kPage, kPageBytes, {}};
  const std::int64_t last = pool.num_pages * kPage - 1;
  // Around every power of two of bytes, and at both ends.
  for (const std::int64_t bytes : {std::int64_t{1} << 31, std::int64_t{1} << 32}) {
    for (std::int64_t offset = -3; offset <= 3; ++offset) {
      pool.slots.push_back(static_cast<std::int32_t>(bytes / v32::kRowBytes + offset));
    }
  }
  for (const std::int64_t slot : {last, last - 1, last - kPage, std::int64_t{0}}) {
    pool.slots.push_back(static_cast<std::int32_t>(slot));
  }
  expect_same_as_small(pool);
}

TEST(LargePool, SlotsUpToTheEndOfInt32) {
  constexpr std::int64_t kPage = 64;
  constexpr std::int64_t kMaxSlot = std::numeric_limits<std::int32_t>::max();
  // 2^31 slots: the last one is the largest int32.
  Pool pool = {(kMaxSlot + 1) / kPage, kPage, kPage * v32::kRowBytes, {}};
  for (const std::int64_t slot :
       {kMaxSlot, kMaxSlot - 1, kMaxSlot - 64, kMaxSlot / 2, kMaxSlot / 2 + 1, std::int64_t{7}}) {
    pool.slots.push_back(static_cast<std::int32_t>(slot));
  }
  expect_same_as_small(pool);
}

TEST(LargePool, PageStrideBeyondTwoToThe31Bytes) {
  constexpr std::int64_t kStride = (std::int64_t{1} << 31) + 16;
  expect_same_as_small({3, 61, kStride, {0, 60, 61, 121, 122, 182, 100, 150}});
}

TEST(LargePool, OnePageBeyondTwoToThe31Bytes) {
  constexpr std::int64_t kPage = 4'000'000;
  expect_same_as_small({2, kPage, kPage * v32::kRowBytes, {0, 3'999'999, 3'273'604, 4'000'000, 7'999'999}});
}

}  // namespace
}  // namespace chiasma::harness
