// The rules of chiasma.h about the arguments of merge and of the cache operations: one line bends one thing, and the
// message must name the argument, its value and what is allowed. Nothing may be written then.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "chiasma/chiasma.hpp"

namespace chiasma::test {
namespace {

constexpr std::uint8_t kFiller = 0x5a;

// Memory for one tensor, aligned as a cache wants it.
class Block {
 public:
  explicit Block(std::size_t bytes) : storage_(bytes + 16, kFiller) {}
  void* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
    return storage_.data() + (16 - address % 16) % 16;
  }
  bool is_untouched() const {
    return std::all_of(storage_.begin(), storage_.end(), [](std::uint8_t byte) { return byte == kFiller; });
  }
  void zero() { std::fill(storage_.begin(), storage_.end(), std::uint8_t{0}); }

 private:
  std::vector<std::uint8_t> storage_;
};

// One way in which a call is wrong. Args: what the operation takes.
template <typename Args>
struct Bad {
  const char* name;
  std::function<void(Args&)> bend;
  std::vector<const char*> message_has;
};

void expect_refused(chiasma_status status, const char* name, const std::vector<const char*>& message_has) {
  EXPECT_EQ(status, CHIASMA_INVALID_ARGUMENT) << name << ": " << chiasma_last_error();
  for (const char* part : message_has) {
    EXPECT_NE(std::string(chiasma_last_error()).find(part), std::string::npos)
        << name << ": missing '" << part << "' in: " << chiasma_last_error();
  }
}

void set_extent(chiasma_tensor& tensor, int dim, std::int64_t extent) {
  tensor.shape[dim] = extent;
}

// ---- quantise: 8 tokens into 2 pages of 5, v32, rotary columns apart ----

struct Quantize {
  Block kv{8 * 512 * 2}, rope{8 * 64 * 2}, slots{8 * 8}, cache{2 * 5 * 656}, count{8}, skipped{8};
  chiasma_quantize_args args{};

  Quantize() {
    slots.zero();
    args.format = CHIASMA_KV_V32;
    args.scale = CHIASMA_SCALE_POW2;
    args.kv = tensor(kv.data(), CHIASMA_BFLOAT16, kCpu, {8, 512});
    args.rope = tensor(rope.data(), CHIASMA_BFLOAT16, kCpu, {8, 64});
    args.slot_mapping = tensor(slots.data(), CHIASMA_INT64, kCpu, {8});
    args.kv_cache = tensor(cache.data(), CHIASMA_UINT8, kCpu, {2, 5, 656});
    args.nonfinite_count = tensor(count.data(), CHIASMA_INT64, kCpu, {1});
    args.skipped_count = tensor(skipped.data(), CHIASMA_INT64, kCpu, {1});
  }
};

const std::vector<Bad<chiasma_quantize_args>> kBadQuantize = {
    {"format", [](auto& a) { a.format = static_cast<chiasma_kv_format>(11); }, {"format is 11", "v32 (1)"}},
    {"scale", [](auto& a) { a.scale = static_cast<chiasma_scale_mode>(3); }, {"scale is 3", "pow2 (1) and amax (2)"}},
    {"kv_scale", [](auto& a) { a.kv_scale = 0.5; }, {"kv_scale is 0.5", "v32", "0 or 1"}},
    {"kv_absent", [](auto& a) { a.kv = {}; }, {"kv is absent"}},
    {"kv_joined_beside_rope", [](auto& a) { set_extent(a.kv, 1, 576); }, {"kv has shape [8, 576]", "must be 512"}},
    {"kv_without_rope", [](auto& a) { a.rope = {}; }, {"kv has shape [8, 512]", "must be 576"}},
    {"kv_dtype", [](auto& a) { a.kv.dtype = CHIASMA_FLOAT32; }, {"kv has dtype float32", "bfloat16"}},
    {"kv_strided", [](auto& a) { a.kv.stride[1] = 2; }, {"kv has stride(1) = 2", "contiguous"}},
    {"rope_extent", [](auto& a) { set_extent(a.rope, 1, 63); }, {"rope has shape [8, 63]", "must be 64"}},
    {"rope_rows", [](auto& a) { set_extent(a.rope, 0, 7); }, {"rope has shape [7, 64]", "must be 8"}},
    {"rope_rank", [](auto& a) { a.rope.rank = 1; }, {"rope has rank 1", "[tokens, 64]"}},
    {"rope_dtype", [](auto& a) { a.rope.dtype = CHIASMA_UINT8; }, {"rope has dtype uint8", "bfloat16"}},
    {"rope_strided", [](auto& a) { a.rope.stride[1] = 2; }, {"rope has stride(1) = 2", "contiguous"}},
    {"rope_null", [](auto& a) { a.rope.data = nullptr; }, {"rope has shape", "NULL"}},
    {"rope_odd",
     [](auto& a) { a.rope.data = static_cast<char*>(a.rope.data) + 1; },
     {"rope starts at address", "multiple of 2"}},
    {"rope_on_cuda", [](auto& a) { a.rope.device = cuda_device(0); }, {"rope is on cuda:0", "kv is on cpu"}},
    {"rope_in_cache", [](auto& a) { a.rope.data = a.kv_cache.data; }, {"kv_cache at", "overlaps rope"}},
    {"rope_without_rotary_columns",
     [](auto& a) {
       a.format = CHIASMA_KV_V32_NOPE;
       set_extent(a.kv, 1, 448);
     },
     {"rope is given with format v32nope", "no rotary"}},
    {"slots_dtype", [](auto& a) { a.slot_mapping.dtype = CHIASMA_INT32; }, {"slot_mapping has dtype int32", "int64"}},
    {"slots_extent", [](auto& a) { set_extent(a.slot_mapping, 0, 9); }, {"slot_mapping has shape [9]", "must be 8"}},
    {"cache_absent", [](auto& a) { a.kv_cache = {}; }, {"kv_cache is absent"}},
    {"count_extent", [](auto& a) { set_extent(a.nonfinite_count, 0, 2); }, {"nonfinite_count has shape [2]"}},
    {"count_dtype", [](auto& a) { a.nonfinite_count.dtype = CHIASMA_INT32; }, {"nonfinite_count has dtype int32"}},
    {"count_in_cache",
     [](auto& a) { a.nonfinite_count.data = a.kv_cache.data; },
     {"nonfinite_count at", "overlaps kv_cache"}},
    {"count_is_slots",
     [](auto& a) { a.nonfinite_count.data = a.slot_mapping.data; },
     {"nonfinite_count at", "overlaps slot_mapping"}},
    {"skipped_extent", [](auto& a) { set_extent(a.skipped_count, 0, 0); }, {"skipped_count has shape [0]"}},
    {"skipped_in_cache",
     [](auto& a) { a.skipped_count.data = a.kv_cache.data; },
     {"skipped_count at", "overlaps kv_cache"}},
    {"counts_are_one",
     [](auto& a) { a.skipped_count.data = a.nonfinite_count.data; },
     {"skipped_count at", "overlaps nonfinite_count"}},
};

TEST(ValidateQuantize, WhatIsWrongIsNamedAndNothingWritten) {
  for (const auto& bad : kBadQuantize) {
    Quantize call;
    bad.bend(call.args);
    expect_refused(chiasma_quantize(&call.args, nullptr), bad.name, bad.message_has);
    EXPECT_TRUE(call.cache.is_untouched() && call.count.is_untouched()) << bad.name;
  }
  Quantize good;
  EXPECT_EQ(chiasma_quantize(&good.args, nullptr), CHIASMA_OK) << chiasma_last_error();
}

TEST(ValidateQuantize, ScaleOfAWholeCache) {
  for (const double bad : {-1.0, std::nan(""), std::numeric_limits<double>::infinity(), 1e39, 1e-39}) {
    Quantize call;
    call.args.format = CHIASMA_KV_FP8;
    call.args.kv_cache = tensor(call.cache.data(), CHIASMA_UINT8, kCpu, {2, 5, 576});
    call.args.kv_scale = bad;
    expect_refused(chiasma_quantize(&call.args, nullptr), "kv_scale", {"kv_scale is", "positive float32"});
    call.args.kv_scale = 0.25;
    EXPECT_EQ(chiasma_quantize(&call.args, nullptr), CHIASMA_OK) << chiasma_last_error();
  }
}

// ---- gather: 6 rows from 2 pages of 5, v32 ----

struct Gather {
  Block cache{2 * 5 * 656}, slots{6 * 8}, table{3 * 2 * 4}, lengths{3 * 4}, starts{3 * 8}, kv{6 * 576 * 4};
  chiasma_gather_args args{};

  explicit Gather(bool by_table) {
    for (Block* block : {&slots, &table, &lengths, &starts}) block->zero();
    args.format = CHIASMA_KV_V32;
    args.kv_cache = tensor(cache.data(), CHIASMA_UINT8, kCpu, {2, 5, 656});
    args.kv = tensor(kv.data(), CHIASMA_FLOAT32, kCpu, {6, 576});
    if (!by_table) {
      args.slots = tensor(slots.data(), CHIASMA_INT64, kCpu, {6});
      return;
    }
    args.block_table = tensor(table.data(), CHIASMA_INT32, kCpu, {3, 2});
    args.seq_lens = tensor(lengths.data(), CHIASMA_INT32, kCpu, {3});
    args.starts = tensor(starts.data(), CHIASMA_INT64, kCpu, {3});
  }
};

const std::vector<Bad<chiasma_gather_args>> kBadGatherBySlots = {
    {"format", [](auto& a) { a.format = static_cast<chiasma_kv_format>(0); }, {"format is 0", "bf16 (3)"}},
    {"kv_scale", [](auto& a) { a.kv_scale = -2; }, {"kv_scale is -2", "v32"}},
    {"cache_absent", [](auto& a) { a.kv_cache = {}; }, {"kv_cache is absent"}},
    {"neither", [](auto& a) { a.slots = {}; }, {"slots and block_table are absent"}},
    {"both", [](auto& a) { a.block_table = a.slots; }, {"block_table is given beside slots"}},
    {"lengths_beside_slots", [](auto& a) { a.seq_lens = a.slots; }, {"seq_lens is given beside slots"}},
    {"starts_beside_slots", [](auto& a) { a.starts = a.slots; }, {"starts is given beside slots"}},
    {"slots_extent", [](auto& a) { set_extent(a.slots, 0, 5); }, {"slots has shape [5]", "must be 6"}},
    {"slots_dtype", [](auto& a) { a.slots.dtype = CHIASMA_FLOAT32; }, {"slots has dtype float32", "int32 or int64"}},
    {"slots_null", [](auto& a) { a.slots.data = nullptr; }, {"slots has shape [6]", "NULL"}},
    {"slots_on_cuda", [](auto& a) { a.slots.device = cuda_device(1); }, {"slots is on cuda:1", "kv_cache is on cpu"}},
    {"kv_absent", [](auto& a) { a.kv = {}; }, {"kv is absent"}},
    {"kv_dtype", [](auto& a) { a.kv.dtype = CHIASMA_UINT8; }, {"kv has dtype uint8", "float32 or bfloat16"}},
    {"kv_extent", [](auto& a) { set_extent(a.kv, 1, 512); }, {"kv has shape [6, 512]", "must be 576"}},
    {"kv_strided", [](auto& a) { a.kv.stride[1] = 2; }, {"kv has stride(1) = 2", "contiguous"}},
    {"kv_overlaps_itself", [](auto& a) { a.kv.stride[0] = 500; }, {"kv with shape", "overlap"}},
    {"kv_is_cache", [](auto& a) { a.kv_cache.data = a.kv.data; }, {"kv at", "overlaps kv_cache"}},
    {"kv_is_slots", [](auto& a) { a.slots.data = a.kv.data; }, {"kv at", "overlaps slots"}},
};

const std::vector<Bad<chiasma_gather_args>> kBadGatherByTable = {
    {"lengths_absent", [](auto& a) { a.seq_lens = {}; }, {"seq_lens is absent"}},
    {"starts_absent", [](auto& a) { a.starts = {}; }, {"starts is absent"}},
    {"table_rank", [](auto& a) { a.block_table.rank = 1; }, {"block_table has rank 1", "[b, max_pages]"}},
    {"table_dtype", [](auto& a) { a.block_table.dtype = CHIASMA_INT64; }, {"block_table has dtype int64", "int32"}},
    {"table_strided", [](auto& a) { a.block_table.stride[1] = 3; }, {"block_table has stride(1) = 3", "contiguous"}},
    {"lengths_extent", [](auto& a) { set_extent(a.seq_lens, 0, 2); }, {"seq_lens has shape [2]", "must be 3"}},
    {"lengths_dtype", [](auto& a) { a.seq_lens.dtype = CHIASMA_INT64; }, {"seq_lens has dtype int64", "int32"}},
    {"starts_extent", [](auto& a) { set_extent(a.starts, 0, 4); }, {"starts has shape [4]", "must be 3"}},
    {"starts_dtype", [](auto& a) { a.starts.dtype = CHIASMA_BFLOAT16; }, {"starts has dtype bfloat16", "int32 or"}},
    {"starts_on_cuda",
     [](auto& a) { a.starts.device = cuda_device(0); },
     {"starts is on cuda:0", "kv_cache is on cpu"}},
    {"kv_is_table", [](auto& a) { a.block_table.data = a.kv.data; }, {"kv at", "overlaps block_table"}},
    {"kv_is_lengths", [](auto& a) { a.seq_lens.data = a.kv.data; }, {"kv at", "overlaps seq_lens"}},
    {"kv_is_starts", [](auto& a) { a.starts.data = a.kv.data; }, {"kv at", "overlaps starts"}},
};

TEST(ValidateGather, WhatIsWrongIsNamedAndNothingWritten) {
  for (const bool by_table : {false, true}) {
    for (const auto& bad : by_table ? kBadGatherByTable : kBadGatherBySlots) {
      Gather call(by_table);
      bad.bend(call.args);
      expect_refused(chiasma_gather_dequantize(&call.args, nullptr), bad.name, bad.message_has);
      EXPECT_TRUE(call.kv.is_untouched()) << bad.name;
    }
    Gather good(by_table);
    EXPECT_EQ(chiasma_gather_dequantize(&good.args, nullptr), CHIASMA_OK) << chiasma_last_error();
  }
}

TEST(ValidateGather, EmptyTensorsNeedNoMemory) {
  Gather no_rows(false);
  no_rows.args.slots = tensor(nullptr, CHIASMA_INT32, kCpu, {0});
  no_rows.args.kv = tensor(nullptr, CHIASMA_BFLOAT16, kCpu, {0, 576});
  EXPECT_EQ(chiasma_gather_dequantize(&no_rows.args, nullptr), CHIASMA_OK) << chiasma_last_error();
  Gather no_requests(true);
  no_requests.args.block_table = tensor(nullptr, CHIASMA_INT32, kCpu, {0, 7});
  no_requests.args.seq_lens = tensor(nullptr, CHIASMA_INT32, kCpu, {0});
  no_requests.args.starts = tensor(nullptr, CHIASMA_INT32, kCpu, {0});
  EXPECT_EQ(chiasma_gather_dequantize(&no_requests.args, nullptr), CHIASMA_OK) << chiasma_last_error();
  EXPECT_TRUE(no_requests.kv.is_untouched());
}

// ---- translate: 3 requests, 2 query tokens, 4 indices, 5 pages of 16 ----

struct Translate {
  Block indices{3 * 2 * 4 * 8}, table{3 * 5 * 4}, request{3 * 4}, slots{3 * 2 * 4 * 4};
  chiasma_translate_args args{};

  Translate() {
    for (Block* block : {&indices, &table, &request}) block->zero();
    args.indices = tensor(indices.data(), CHIASMA_INT32, kCpu, {3, 2, 4});
    args.block_table = tensor(table.data(), CHIASMA_INT32, kCpu, {3, 5});
    args.request = tensor(request.data(), CHIASMA_INT32, kCpu, {3});
    args.page = 16;
    args.slots = tensor(slots.data(), CHIASMA_INT32, kCpu, {3, 2, 4});
  }
};

const std::vector<Bad<chiasma_translate_args>> kBadTranslate = {
    {"indices_absent", [](auto& a) { a.indices = {}; }, {"indices is absent"}},
    {"indices_dtype", [](auto& a) { a.indices.dtype = CHIASMA_FLOAT32; }, {"indices has dtype float32", "int64"}},
    {"indices_rank", [](auto& a) { a.indices.rank = 2; }, {"indices has rank 2", "[b, s_q, topk]"}},
    {"indices_strided", [](auto& a) { a.indices.stride[2] = 2; }, {"indices has stride(2) = 2", "contiguous"}},
    {"indices_null", [](auto& a) { a.indices.data = nullptr; }, {"indices has shape", "NULL"}},
    {"table_dtype", [](auto& a) { a.block_table.dtype = CHIASMA_INT64; }, {"block_table has dtype int64", "int32"}},
    {"table_strided", [](auto& a) { a.block_table.stride[1] = 2; }, {"block_table has stride(1) = 2", "contiguous"}},
    {"table_on_cuda", [](auto& a) { a.block_table.device = cuda_device(0); }, {"block_table is on cuda:0", "on cpu"}},
    {"table_rows",
     [](auto& a) {
       a.request = {};
       set_extent(a.block_table, 0, 2);
     },
     {"block_table has 2 rows", "3 requests"}},
    {"request_extent", [](auto& a) { set_extent(a.request, 0, 4); }, {"request has shape [4]", "must be 3"}},
    {"request_dtype", [](auto& a) { a.request.dtype = CHIASMA_INT64; }, {"request has dtype int64", "int32"}},
    {"request_orphan", [](auto& a) { a.block_table = {}; }, {"request is given", "block_table is absent"}},
    {"page_0", [](auto& a) { a.page = 0; }, {"page is 0", "1 to 2147483647"}},
    {"page_large", [](auto& a) { a.page = std::int64_t{1} << 31; }, {"page is 2147483648", "1 to 2147483647"}},
    {"world_negative", [](auto& a) { a.cp_world = -1; }, {"cp_world is -1", ">= 0"}},
    {"interleave_negative", [](auto& a) { a.cp_interleave = -4; }, {"cp_interleave is -4", ">= 0"}},
    {"rank_negative", [](auto& a) { a.cp_rank = -1; }, {"cp_rank is -1", "0 to 0"}},
    {"rank_large",
     [](auto& a) {
       a.cp_world = 4;
       a.cp_rank = 4;
     },
     {"cp_rank is 4", "0 to 3"}},
    {"world_without_table",
     [](auto& a) {
       a.block_table = a.request = {};
       a.cp_world = 2;
     },
     {"cp_world is 2", "block_table is absent"}},
    {"slots_absent", [](auto& a) { a.slots = {}; }, {"slots is absent"}},
    {"slots_dtype", [](auto& a) { a.slots.dtype = CHIASMA_INT64; }, {"slots has dtype int64", "int32"}},
    {"slots_extent", [](auto& a) { set_extent(a.slots, 2, 3); }, {"slots has shape [3, 2, 3]", "must be 4"}},
    {"slots_overlap_themselves", [](auto& a) { a.slots.stride[1] = 2; }, {"slots with shape", "overlap"}},
    {"slots_are_table", [](auto& a) { a.block_table.data = a.slots.data; }, {"slots at", "overlaps block_table"}},
    {"slots_are_request", [](auto& a) { a.request.data = a.slots.data; }, {"slots at", "overlaps request"}},
};

TEST(ValidateTranslate, WhatIsWrongIsNamedAndNothingWritten) {
  for (const auto& bad : kBadTranslate) {
    Translate call;
    bad.bend(call.args);
    expect_refused(chiasma_translate_indices(&call.args, nullptr), bad.name, bad.message_has);
    EXPECT_TRUE(call.slots.is_untouched()) << bad.name;
  }
  Translate good;
  EXPECT_EQ(chiasma_translate_indices(&good.args, nullptr), CHIASMA_OK) << chiasma_last_error();
}

TEST(ValidateTranslate, InPlaceIsForInt32AndTheSameStrides) {
  Translate call;
  call.args.slots = call.args.indices;
  EXPECT_EQ(chiasma_translate_indices(&call.args, nullptr), CHIASMA_OK) << chiasma_last_error();
  // Each slot would be written where another index is still to be read.
  call.args.slots.stride[0] = 12;
  expect_refused(chiasma_translate_indices(&call.args, nullptr), "other strides", {"slots at", "overlaps indices"});
  call.args.slots.stride[0] = 8;
  call.args.indices.dtype = CHIASMA_INT64;
  expect_refused(chiasma_translate_indices(&call.args, nullptr), "int64", {"slots at", "overlaps indices"});
}

TEST(ValidateTranslate, PageIsIgnoredWithoutATable) {
  Translate call;
  call.args.block_table = call.args.request = {};
  call.args.page = -7;
  EXPECT_EQ(chiasma_translate_indices(&call.args, nullptr), CHIASMA_OK) << chiasma_last_error();
}

// ---- where they run ----

TEST(CacheOperations, NullStructsAreNamed) {
  EXPECT_EQ(chiasma_gather_dequantize(nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_STREQ(chiasma_last_error(), "args is NULL");
  EXPECT_EQ(chiasma_translate_indices(nullptr, nullptr), CHIASMA_INVALID_ARGUMENT);
  EXPECT_STREQ(chiasma_last_error(), "args is NULL");
}

// A device that no machine has, so that this holds with and without CUDA.
TEST(CacheOperations, DevicesThatAreNotThereAreNamed) {
  const auto move = [](std::initializer_list<chiasma_tensor*> tensors) {
    for (chiasma_tensor* tensor : tensors) tensor->device = cuda_device(1000);
  };
  Quantize quantize;
  move({&quantize.args.kv, &quantize.args.rope, &quantize.args.slot_mapping, &quantize.args.kv_cache,
        &quantize.args.nonfinite_count, &quantize.args.skipped_count});
  EXPECT_EQ(chiasma_quantize(&quantize.args, nullptr), CHIASMA_DEVICE_UNAVAILABLE) << chiasma_last_error();
  Gather gather(false);
  move({&gather.args.kv_cache, &gather.args.slots, &gather.args.kv});
  EXPECT_EQ(chiasma_gather_dequantize(&gather.args, nullptr), CHIASMA_DEVICE_UNAVAILABLE) << chiasma_last_error();
  Translate translate;
  move({&translate.args.indices, &translate.args.block_table, &translate.args.request, &translate.args.slots});
  EXPECT_EQ(chiasma_translate_indices(&translate.args, nullptr), CHIASMA_DEVICE_UNAVAILABLE) << chiasma_last_error();
  EXPECT_NE(std::string(chiasma_last_error()).size(), 0u);
}

}  // namespace
}  // namespace chiasma::test
