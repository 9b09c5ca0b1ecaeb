// Workloads: the same everywhere, and as hostile as their case line promises.
#include "harness/workload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "format/kv_format.h"
#include "format/numbers.h"
#include "harness/random.h"

namespace chiasma::harness {
namespace {

std::unique_ptr<Workload> make(const std::string& line) {
  Case spec;
  std::string error;
  EXPECT_TRUE(parse_case(line, &spec, &error)) << error;
  std::unique_ptr<Workload> workload = Workload::make(spec, &error);
  EXPECT_NE(workload, nullptr) << error;
  return workload;
}

std::uint64_t hash_of(const Workload& workload) {
  std::uint64_t hash = 0;
  for (const Region& region : workload.regions()) {
    for (std::size_t n = 0; n < region.bytes(); ++n)
      hash = derive(hash, std::to_integer<std::uint64_t>(region.base()[n]));
  }
  return hash;
}

std::int32_t index_at(const Workload& workload, std::int64_t b, std::int64_t s, std::int64_t entry) {
  const chiasma_tensor& indices = workload.args().indices;
  return static_cast<const std::int32_t*>(indices.data)[b * indices.stride[0] + s * indices.stride[1] + entry];
}

const std::byte* v32_row(const Workload& workload, std::int64_t slot) {
  const chiasma_tensor& cache = workload.args().kv_cache;
  return static_cast<const std::byte*>(cache.data) + slot / cache.shape[1] * cache.stride[0] +
         slot % cache.shape[1] * v32::kRowBytes;
}

bool all_bytes_are(const std::byte* from, std::int64_t count, int value) {
  return std::all_of(from, from + count, [value](std::byte byte) { return byte == std::byte(value); });
}

TEST(Random, GaussHasMeanZeroAndDeviationOne) {
  constexpr int kCount = 200000;
  double sum = 0, squares = 0;
  for (int n = 0; n < kCount; ++n) {
    const double value = gauss(5, static_cast<std::uint64_t>(n));
    sum += value;
    squares += value * value;
  }
  EXPECT_NEAR(sum / kCount, 0.0, 0.01);
  EXPECT_NEAR(squares / kCount, 1.0, 0.01);
}

TEST(Random, PermuteIsABijection) {
  for (const std::uint64_t n : {1u, 2u, 3u, 64u, 1000u, 4097u}) {
    std::set<std::uint64_t> images;
    for (std::uint64_t index = 0; index < n; ++index) {
      const std::uint64_t image = permute(index, n, 9);
      EXPECT_LT(image, n);
      images.insert(image);
    }
    EXPECT_EQ(images.size(), n);
  }
}

TEST(Workload, IsAFunctionOfItsLine) {
  const std::string line = "decode b=2 h=3 sq=2 pool=100 topk=33 page=7 scale=amax layout=odd len=random sink=random";
  EXPECT_EQ(hash_of(*make(line)), hash_of(*make(line)));
  EXPECT_NE(hash_of(*make(line)), hash_of(*make(line + " seed=2")));
}

// Pinned: a case line means the same tensors on every machine and in every version.
TEST(Workload, BytesArePinned) {
  EXPECT_EQ(hash_of(*make("decode b=2 h=3 pool=100 topk=33 page=7 scale=amax valid=0.8 garbage=1 dist=outlier")),
            2514228447635143704u);
  EXPECT_EQ(hash_of(*make("decode b=2 h=3 pool=90 topk=33 fmt=v4 xpool=50 xtopk=9 layout=strided poison=nan")),
            1167270147032393287u);
  EXPECT_EQ(hash_of(*make("decode b=2 h=3 pool=90 topk=33 fmt=bf16 sink=random len=random")), 9156348325152473146u);
}

TEST(Workload, RandomIndicesDoNotRepeatAndStayInTheRequestsPages) {
  const auto workload = make("decode b=3 h=1 sq=2 pool=100 topk=100 page=7");
  std::map<std::int64_t, std::set<std::int64_t>> pages;
  for (std::int64_t row = 0; row < 6; ++row) {
    const std::vector<std::int64_t> slots = selected_slots(workload->args(), row, false);
    EXPECT_EQ(std::set<std::int64_t>(slots.begin(), slots.end()).size(), 100u);
    for (const std::int64_t slot : slots) pages[row / 2].insert(slot / 7);
  }
  for (std::int64_t request = 0; request < 3; ++request) EXPECT_EQ(pages[request].size(), 15u);
  std::set<std::int64_t> all;
  for (const auto& [request, own] : pages) all.insert(own.begin(), own.end());
  EXPECT_EQ(all.size(), 45u) << "requests share a page";
  // Scattered: a request's pages are no run of neighbours.
  EXPECT_GT(*pages[0].rbegin() - *pages[0].begin(), 14);
}

TEST(Workload, IndexPatterns) {
  const auto window = make("decode b=1 h=1 pool=50 topk=20 page=64 idx=window");
  const std::int32_t first = index_at(*window, 0, 0, 0);
  for (int entry = 0; entry < 20; ++entry) EXPECT_EQ(index_at(*window, 0, 0, entry), first + entry);
  EXPECT_EQ(first % 64, 30);
  const auto sorted = make("decode b=1 h=1 pool=64 topk=20 page=64 idx=sorted");
  for (int entry = 1; entry < 20; ++entry) {
    EXPECT_LT(index_at(*sorted, 0, 0, entry - 1), index_at(*sorted, 0, 0, entry));
  }
  const auto same = make("decode b=1 h=1 pool=64 topk=20 idx=same");
  for (int entry = 1; entry < 20; ++entry) EXPECT_EQ(index_at(*same, 0, 0, entry), index_at(*same, 0, 0, 0));
}

TEST(Workload, InvalidEntriesAreMinusOneOrGarbage) {
  const auto masked = make("decode b=1 h=1 pool=3000 topk=2000 valid=0.3");
  const auto garbage = make("decode b=1 h=1 pool=3000 topk=2000 valid=0.3 garbage=1");
  const std::int64_t num_slots = garbage->args().kv_cache.shape[0] * garbage->args().kv_cache.shape[1];
  std::set<std::int32_t> kinds;
  std::int64_t num_valid = 0;
  for (int entry = 0; entry < 2000; ++entry) {
    const std::int32_t plain = index_at(*masked, 0, 0, entry);
    const std::int32_t wild = index_at(*garbage, 0, 0, entry);
    if (plain >= 0) {
      EXPECT_EQ(plain, wild);
      ++num_valid;
      continue;
    }
    EXPECT_EQ(plain, -1);
    EXPECT_TRUE(wild < 0 || wild >= num_slots) << wild;
    kinds.insert(wild);
  }
  EXPECT_NEAR(static_cast<double>(num_valid), 600.0, 100.0);
  EXPECT_TRUE(kinds.contains(static_cast<std::int32_t>(num_slots)));
  EXPECT_TRUE(kinds.contains(std::numeric_limits<std::int32_t>::max()));
  EXPECT_TRUE(kinds.contains(std::numeric_limits<std::int32_t>::min()));
}

TEST(Workload, LengthsCutRowsShortAndSomeNeedClamping) {
  const auto workload = make("decode b=64 h=1 pool=50 topk=20 len=random");
  const auto* lengths = static_cast<const std::int32_t*>(workload->args().topk_length.data);
  EXPECT_TRUE(std::any_of(lengths, lengths + 64, [](std::int32_t n) { return n < 0; }));
  EXPECT_TRUE(std::any_of(lengths, lengths + 64, [](std::int32_t n) { return n > 20; }));
  for (std::int64_t row = 0; row < 64; ++row) {
    EXPECT_EQ(selected_slots(workload->args(), row, false).size(),
              static_cast<std::size_t>(std::clamp(lengths[row], 0, 20)));
    // What lies behind would select something.
    EXPECT_GE(index_at(*workload, row, 0, 19), 0);
  }
  EXPECT_TRUE(selected_slots(make("decode b=1 h=1 pool=50 topk=20 len=zero")->args(), 0, false).empty());
}

TEST(Workload, EachQueryTokenCanHaveALengthOfItsOwn) {
  const auto workload = make("decode b=16 h=1 sq=5 pool=50 topk=20 len=rows layout=strided");
  const chiasma_tensor& lengths = workload->args().topk_length;
  ASSERT_EQ(lengths.rank, 2);
  std::set<std::int32_t> of_one_request;
  for (std::int64_t row = 0; row < 80; ++row) {
    const std::int32_t length =
        static_cast<const std::int32_t*>(lengths.data)[row / 5 * lengths.stride[0] + row % 5 * lengths.stride[1]];
    if (row < 5) of_one_request.insert(length);
    EXPECT_EQ(selected_slots(workload->args(), row, false).size(), static_cast<std::size_t>(std::clamp(length, 0, 20)));
  }
  EXPECT_GT(of_one_request.size(), 1u);
}

TEST(Workload, APairHoldsTheNumbersOfAWholeQuery) {
  const auto whole = make("decode b=2 h=3 sq=2 pool=100 topk=30");
  const auto pair = make("decode b=2 h=3 sq=2 pool=100 topk=30 q=pair");
  const chiasma_decode_args& args = pair->args();
  ASSERT_EQ(args.q.shape[3], 512);
  ASSERT_EQ(args.q_rope.shape[3], 64);
  const auto* q = static_cast<const bf16_t*>(whole->args().q.data);
  for (std::int64_t head = 0; head < 2 * 2 * 3; ++head) {
    const auto* nope = static_cast<const bf16_t*>(args.q.data) + head * 512;
    const auto* rope = static_cast<const bf16_t*>(args.q_rope.data) + head * 64;
    EXPECT_TRUE(std::equal(nope, nope + 512, q + head * 576));
    EXPECT_TRUE(std::equal(rope, rope + 64, q + head * 576 + 512));
  }
}

TEST(Workload, PoisonFillsExactlyTheUnselectedSlots) {
  const auto workload =
      make("decode b=2 h=1 sq=2 pool=100 topk=30 page=7 scale=amax len=random layout=strided poison=nan");
  std::set<std::int64_t> selected;
  for (std::int64_t row = 0; row < 4; ++row) {
    for (const std::int64_t slot : selected_slots(workload->args(), row, false)) selected.insert(slot);
  }
  const chiasma_tensor& cache = workload->args().kv_cache;
  for (std::int64_t slot = 0; slot < cache.shape[0] * cache.shape[1]; ++slot) {
    const std::byte* row = v32_row(*workload, slot);
    if (!selected.contains(slot)) {
      EXPECT_TRUE(all_bytes_are(row, v32::kRowBytes, 0xff)) << slot;
      continue;
    }
    for (int c = 0; c < v32::kNopeDim; ++c) {
      EXPECT_FALSE(std::isnan(e4m3_to_float(std::to_integer<std::uint8_t>(row[c])))) << slot << " " << c;
    }
  }
  for (std::int64_t page = 0; page + 1 < cache.shape[0]; ++page) {
    const std::byte* end = v32_row(*workload, page * 7 + 6) + v32::kRowBytes;
    EXPECT_TRUE(all_bytes_are(end, cache.stride[0] - 7 * v32::kRowBytes, 0xff));
  }
}

// 0xFF is NaN in every number format of a cache.
TEST(Workload, PoisonByteIsNanEverywhere) {
  EXPECT_TRUE(std::isnan(e4m3_to_float(0xff)));
  EXPECT_TRUE(std::isnan(ue8m0_to_float(0xff)));
  EXPECT_TRUE(std::isnan(to_float(bf16_t{0xffff})));
  EXPECT_TRUE(std::isnan(std::bit_cast<float>(0xffffffffu)));
}

TEST(Workload, IndexPaddingSelectsNan) {
  const auto workload = make("decode b=2 h=1 sq=2 pool=100 topk=30 scale=amax layout=odd");
  const std::int32_t behind = index_at(*workload, 1, 1, 30);
  ASSERT_GE(behind, 0);
  EXPECT_TRUE(all_bytes_are(v32_row(*workload, behind), v32::kRowBytes, 0xff));
}

TEST(Workload, LayoutsPadAsPromised) {
  const auto strided = make("decode b=2 h=3 sq=2 pool=100 topk=30 layout=strided");
  const chiasma_tensor& q = strided->args().q;
  EXPECT_GT(q.stride[2], 576);
  EXPECT_EQ(q.stride[2] % 8, 0);
  EXPECT_GT(q.stride[1], q.stride[0]) << "query tokens vary slowest";
  EXPECT_EQ(strided->args().kv_cache.rank, 4);
  EXPECT_GT(strided->args().kv_cache.stride[0], 64 * 656);
  EXPECT_EQ(strided->args().kv_cache.stride[0] % 16, 0);
  EXPECT_GT(strided->args().lse.stride[2], 1);
  const auto odd = make("decode b=2 h=3 sq=2 pool=100 topk=30 layout=odd");
  EXPECT_EQ(odd->args().q.stride[2] % 2, 1);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(odd->args().q.data) % 4, 2u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(odd->args().kv_cache.data) % 32, 16u);
  const auto packed = make("decode b=2 h=3 sq=2 pool=100 topk=30");
  EXPECT_EQ(packed->args().kv_cache.rank, 3);
  EXPECT_EQ(packed->args().q.stride[0], 2 * 3 * 576);
}

TEST(Workload, AmaxScalesAreNoPowersOfTwo) {
  const auto workload = make("decode b=1 h=1 pool=200 topk=200 scale=amax");
  int arbitrary = 0;
  for (const std::int64_t slot : selected_slots(workload->args(), 0, false)) {
    float scale = 0;
    std::memcpy(&scale, v32_row(*workload, slot) + v32::kScalesOffset, sizeof scale);
    int exponent = 0;
    arbitrary += std::frexp(scale, &exponent) != 0.5f ? 1 : 0;
  }
  EXPECT_GT(arbitrary, 190);
}

TEST(Workload, LargePoolsAreFilledWithCopies) {
  const auto workload = make("decode b=2 h=1 pool=40000 topk=2");
  std::set<std::string> rows;
  std::int64_t num_poisoned = 0;
  const chiasma_tensor& cache = workload->args().kv_cache;
  for (std::int64_t slot = 0; slot < cache.shape[0] * cache.shape[1]; ++slot) {
    const std::byte* row = v32_row(*workload, slot);
    num_poisoned += all_bytes_are(row, v32::kRowBytes, 0xff) ? 1 : 0;
    rows.insert(std::string(reinterpret_cast<const char*>(row), v32::kRowBytes));
  }
  EXPECT_EQ(num_poisoned, 64) << "only the spare page";
  EXPECT_GT(rows.size(), 25000u);
}

TEST(Workload, RefusesWhatDoesNotFitInMemory) {
  Case spec;
  std::string error;
  ASSERT_TRUE(parse_case("decode b=1000000 h=128 pool=1 page=1 topk=1 sq=1000", &spec, &error)) << error;
  EXPECT_EQ(Workload::make(spec, &error), nullptr);
  EXPECT_NE(error.find("memory"), std::string::npos) << error;
}

TEST(Workload, GuardsNoticeEveryStrayByte) {
  const auto workload = make("decode b=2 h=3 sq=2 pool=10 topk=3 layout=strided");
  std::string where;
  EXPECT_TRUE(workload->guards_intact(&where)) << where;
  const chiasma_tensor& out = workload->args().out;
  auto* bytes = static_cast<std::byte*>(out.data);
  for (const std::int64_t stray : {std::int64_t{-1}, std::int64_t{kValueDim * 2}, (out.stride[2] * 3) * 2 + 1}) {
    const std::byte before = bytes[stray];
    bytes[stray] = std::byte{0};
    EXPECT_FALSE(workload->guards_intact(&where)) << stray;
    EXPECT_NE(where.find("out"), std::string::npos) << where;
    bytes[stray] = before;
  }
  bytes[0] = std::byte{0};
  EXPECT_TRUE(workload->guards_intact(&where)) << "an element is no guard: " << where;
}

}  // namespace
}  // namespace chiasma::harness
