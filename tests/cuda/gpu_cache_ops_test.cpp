// The cache operations and merge on a device against their twins on the CPU, bit for bit. Everything around the outputs
// is compared, too: what the CPU leaves alone the device leaves alone.
#include <chiasma/chiasma.h>

#include <cstring>
#include <functional>
#include <random>

#include "format/kv_format.h"
#include "gpu_fixture.h"

namespace chiasma::harness {
namespace {

// A tensor on the host and its copy on the device, whole allocations with room on both sides.
class Twin {
 public:
  Twin(Device& device, chiasma_dtype dtype, std::vector<std::int64_t> shape, std::vector<std::int64_t> stride = {},
       std::int64_t lead_elements = 0)
      : device_(device) {
    const chiasma_device cpu = {CHIASMA_CPU, 0};
    host_ = chiasma_contiguous(nullptr, dtype, cpu, static_cast<std::int32_t>(shape.size()), shape.data());
    std::copy(stride.begin(), stride.end(), host_.stride);
    std::int64_t span = 1;
    for (int dim = 0; dim < host_.rank; ++dim)
      span += std::max<std::int64_t>(0, host_.shape[dim] - 1) * host_.stride[dim];
    bytes_.resize(static_cast<std::size_t>((span + lead_elements) * element_bytes()) + 2 * kZone);
    block_ = device.allocate(bytes_.size());
    offset_ = kZone + static_cast<std::size_t>(lead_elements * element_bytes());
    host_.data = bytes_.data() + offset_;
  }

  std::int64_t element_bytes() const {
    switch (host_.dtype) {
      case CHIASMA_UINT8: return 1;
      case CHIASMA_BFLOAT16: return 2;
      case CHIASMA_INT64: return 8;
      default: return 4;
    }
  }
  template <typename T>
  T* data() {
    return static_cast<T*>(host_.data);
  }
  const chiasma_tensor& host() const { return host_; }
  chiasma_tensor on_device() const {
    chiasma_tensor tensor = host_;
    tensor.device = device_.id();
    tensor.data = block_.get() + offset_;
    return tensor;
  }
  std::vector<std::byte>& bytes() { return bytes_; }
  void fill_random(std::mt19937& random) {
    for (std::byte& byte : bytes_) byte = static_cast<std::byte>(random());
  }
  void upload() { ASSERT_TRUE(device_.copy_to_device(block_.get(), bytes_.data(), bytes_.size())); }
  std::vector<std::byte> download() const {
    std::vector<std::byte> bytes(bytes_.size());
    EXPECT_TRUE(device_.copy_to_host(bytes.data(), block_.get(), bytes.size()));
    return bytes;
  }

 private:
  static constexpr std::size_t kZone = 4096;
  Device& device_;
  chiasma_tensor host_{};
  std::vector<std::byte> bytes_;
  DeviceBlock block_;
  std::size_t offset_;
};

// Whether the device holds what the host does after its own run.
void expect_same(Twin& twin, const std::string& what) {
  const std::vector<std::byte> device = twin.download();
  for (std::size_t i = 0; i < device.size(); ++i) {
    ASSERT_EQ(device[i], twin.bytes()[i]) << what << ", byte " << i << " of " << device.size();
  }
}

void expect_ok(chiasma_status status, const std::string& what) {
  ASSERT_EQ(status, CHIASMA_OK) << what << ": " << chiasma_last_error();
}

class GpuCacheOps : public GpuTest {
 protected:
  void finish(const std::string& what) {
    std::string error;
    ASSERT_TRUE(device_->synchronize(&error)) << what << ": " << error;
  }

  // Page strides of 48 bytes more than the format's writers use.
  Twin cache_of(KvFormat format, std::int64_t pages, std::int64_t page) {
    const std::int64_t element_bytes = traits_of(format).is_quantized() ? 1 : 2;
    const std::int64_t stride = padded_page_bytes(format, static_cast<int>(page)) + 48;
    return Twin(*device_, element_bytes == 1 ? CHIASMA_UINT8 : CHIASMA_BFLOAT16, {pages, page, token_extent(format)},
                {stride / element_bytes, token_extent(format), 1});
  }

  std::mt19937 random_{20261201};
};

struct QuantizeShape {
  std::int64_t tokens, pages, page;
  bool has_rope, is_odd, has_mapping;
};

// Values of every kind: ordinary ones, and in some rows any bits.
void fill_values(Twin& kv, std::mt19937& random, std::int64_t rows, std::int64_t columns) {
  kv.fill_random(random);
  for (std::int64_t row = 0; row < rows; ++row) {
    if (row % 5 == 0) continue;
    auto* values = kv.data<std::uint16_t>() + row * kv.host().stride[0];
    const float deviation = std::exp2(static_cast<float>(static_cast<int>(random() % 60) - 40));
    for (std::int64_t c = 0; c < columns; ++c) {
      const float value =
          row % 5 == 1 ? (c % 3 == 0 ? -0.0f : 0.0f) : std::normal_distribution<float>(0, deviation)(random);
      std::uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      values[c] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
}

TEST_F(GpuCacheOps, QuantizeStoresTheBytesOfTheCpu) {
  const QuantizeShape shapes[] = {{300, 5, 61, false, false, true},
                                  {257, 300, 1, false, true, true},
                                  {64, 1, 64, false, false, false},
                                  {777, 4, 256, true, false, true},
                                  {130, 3, 64, true, true, true}};
  for (const KvFormat format : kAllFormats) {
    const RowTraits traits = traits_of(format);
    for (const chiasma_scale_mode mode : {CHIASMA_SCALE_POW2, CHIASMA_SCALE_AMAX}) {
      if (mode == CHIASMA_SCALE_AMAX && traits.scale_type == ScaleType::ue8m0) continue;
      for (const QuantizeShape& shape : shapes) {
        if (shape.has_rope && !traits.has_rope) continue;
        const std::string what = std::string(format_name(format)) + (mode == CHIASMA_SCALE_AMAX ? " amax " : " pow2 ") +
                                 std::to_string(shape.tokens);
        const std::int64_t columns = traits.key_dim() - (shape.has_rope ? kRopeDim : 0);
        const std::int64_t odd = shape.is_odd ? 3 : 8;
        Twin kv(*device_, CHIASMA_BFLOAT16, {shape.tokens, columns}, {columns + odd, 1}, shape.is_odd ? 1 : 0);
        Twin rope(*device_, CHIASMA_BFLOAT16, {shape.tokens, kRopeDim}, {kRopeDim + odd, 1}, shape.is_odd ? 1 : 0);
        fill_values(kv, random_, shape.tokens, columns);
        fill_values(rope, random_, shape.tokens, kRopeDim);
        Twin cache = cache_of(format, shape.pages, shape.page);
        cache.fill_random(random_);
        // Slots in random order, none twice; some outside, some skipped.
        Twin mapping(*device_, CHIASMA_INT64, {shape.tokens});
        std::vector<std::int64_t> slots(static_cast<std::size_t>(std::max(shape.tokens, shape.pages * shape.page)));
        for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int64_t>(i);
        std::shuffle(slots.begin(), slots.end(), random_);
        for (std::int64_t i = 0; i < shape.tokens; ++i) {
          const std::int64_t odd_slots[] = {-1, std::int64_t{1} << 40, INT64_MIN};
          mapping.data<std::int64_t>()[i] = i % 11 == 0 ? odd_slots[i / 11 % 3] : slots[static_cast<std::size_t>(i)];
        }
        Twin count(*device_, CHIASMA_INT64, {1}), skipped(*device_, CHIASMA_INT64, {1});
        for (Twin* twin : {&kv, &rope, &cache, &mapping, &count, &skipped}) twin->upload();

        chiasma_quantize_args args{};
        args.format = static_cast<chiasma_kv_format>(format);
        args.scale = mode;
        args.kv_scale = traits.scale_type == ScaleType::cache ? 0.37 : 0;
        const auto with = [&](auto&& tensor_of) {
          args.kv = tensor_of(kv);
          if (shape.has_rope) args.rope = tensor_of(rope);
          args.kv_cache = tensor_of(cache);
          if (shape.has_mapping) args.slot_mapping = tensor_of(mapping);
          args.nonfinite_count = tensor_of(count);
          args.skipped_count = tensor_of(skipped);
          expect_ok(chiasma_quantize(&args, nullptr), what);
        };
        with([](Twin& twin) { return twin.host(); });
        with([](Twin& twin) { return twin.on_device(); });
        finish(what);
        expect_same(cache, what);
        expect_same(count, what + " count");
        expect_same(skipped, what + " skipped");
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Every bf16 number there is, in tiles whose scale is chosen from their largest.
TEST_F(GpuCacheOps, QuantizeIsExactForEveryBf16Number) {
  for (const chiasma_scale_mode mode : {CHIASMA_SCALE_POW2, CHIASMA_SCALE_AMAX}) {
    Twin kv(*device_, CHIASMA_BFLOAT16, {128, 576});
    for (std::int64_t i = 0; i < 128 * 576; ++i) {
      kv.data<std::uint16_t>()[i] = i % 576 < 512 ? static_cast<std::uint16_t>(i / 576 * 512 + i % 576) : 0;
    }
    Twin cache(*device_, CHIASMA_UINT8, {2, 64, 656});
    kv.upload();
    cache.upload();
    chiasma_quantize_args args{};
    args.format = CHIASMA_KV_V32;
    args.scale = mode;
    args.kv = kv.host();
    args.kv_cache = cache.host();
    expect_ok(chiasma_quantize(&args, nullptr), "cpu");
    args.kv = kv.on_device();
    args.kv_cache = cache.on_device();
    expect_ok(chiasma_quantize(&args, nullptr), "cuda");
    finish("every number");
    expect_same(cache, mode == CHIASMA_SCALE_AMAX ? "amax" : "pow2");
  }
}

TEST_F(GpuCacheOps, DequantizeGivesTheNumbersOfTheCpu) {
  for (const KvFormat format : kAllFormats) {
    for (const chiasma_dtype dtype : {CHIASMA_FLOAT32, CHIASMA_BFLOAT16}) {
      for (const auto& [pages, page, gap] : {std::tuple{3, 61, 0}, std::tuple{70, 1, 8}, std::tuple{2, 256, 3}}) {
        const std::string what = std::string(format_name(format)) + " page " + std::to_string(page);
        Twin cache = cache_of(format, pages, page);
        cache.fill_random(random_);
        const std::int64_t dim = key_dim(format);
        Twin kv(*device_, dtype, {pages, page, dim}, {page * (dim + gap) + 8 * gap, dim + gap, 1});
        kv.fill_random(random_);
        cache.upload();
        kv.upload();
        chiasma_dequantize_args args{};
        args.format = static_cast<chiasma_kv_format>(format);
        args.kv_scale = traits_of(format).scale_type == ScaleType::cache ? 0.37 : 0;
        args.kv_cache = cache.host();
        args.kv = kv.host();
        expect_ok(chiasma_dequantize(&args, nullptr), what);
        args.kv_cache = cache.on_device();
        args.kv = kv.on_device();
        expect_ok(chiasma_dequantize(&args, nullptr), what);
        finish(what);
        expect_same(kv, what);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(GpuCacheOps, GatherGivesTheRowsOfTheCpuByEitherWay) {
  constexpr std::int64_t kPages = 9, kRows = 500, kRequests = 5, kMaxPages = 4;
  for (const KvFormat format : kAllFormats) {
    for (const std::int64_t page : {1, 61, 64}) {
      for (const bool by_table : {false, true}) {
        for (const bool is_wide : {false, true}) {
          const std::string what = std::string(format_name(format)) + (by_table ? " table " : " slots ") +
                                   std::to_string(page) + (is_wide ? " int64" : " int32");
          Twin cache = cache_of(format, kPages, page);
          cache.fill_random(random_);
          const std::int64_t dim = key_dim(format);
          Twin kv(*device_, is_wide ? CHIASMA_FLOAT32 : CHIASMA_BFLOAT16, {kRows, dim}, {dim + (is_wide ? 3 : 8), 1});
          kv.fill_random(random_);
          const chiasma_dtype integers = is_wide ? CHIASMA_INT64 : CHIASMA_INT32;
          const auto set = [&](Twin& twin, std::int64_t i, std::int64_t value) {
            if (is_wide) twin.data<std::int64_t>()[i] = value;
            if (!is_wide) twin.data<std::int32_t>()[i] = static_cast<std::int32_t>(value);
          };
          Twin slots(*device_, integers, {kRows});
          for (std::int64_t i = 0; i < kRows; ++i) {
            set(slots, i, i % 7 == 0 ? -1 : static_cast<std::int64_t>(random_() % (kPages * page + 3)));
          }
          Twin table(*device_, CHIASMA_INT32, {kRequests, kMaxPages}, {kMaxPages + 2, 1});
          table.fill_random(random_);
          for (std::int64_t i = 0; i < kRequests * kMaxPages; ++i) {
            table.data<std::int32_t>()[i / kMaxPages * (kMaxPages + 2) + i % kMaxPages] =
                static_cast<std::int32_t>(random_() % (kPages + 2)) - 1;
          }
          Twin lengths(*device_, CHIASMA_INT32, {kRequests}), starts(*device_, integers, {kRequests});
          const std::int32_t some_lengths[kRequests] = {-3, 0, static_cast<std::int32_t>(page) * 2, 1000000, 7};
          // Before the first row, far behind the last, and across both ends.
          const std::int64_t some_starts[kRequests] = {0, 3, -2, 200, is_wide ? INT64_MAX : INT32_MAX};
          for (std::int64_t i = 0; i < kRequests; ++i) {
            lengths.data<std::int32_t>()[i] = some_lengths[i];
            set(starts, i, some_starts[i]);
          }
          for (Twin* twin : {&cache, &kv, &slots, &table, &lengths, &starts}) twin->upload();
          chiasma_gather_args args{};
          args.format = static_cast<chiasma_kv_format>(format);
          const auto with = [&](auto&& tensor_of) {
            args.kv_cache = tensor_of(cache);
            args.kv = tensor_of(kv);
            if (!by_table) args.slots = tensor_of(slots);
            if (by_table) {
              args.block_table = tensor_of(table);
              args.seq_lens = tensor_of(lengths);
              args.starts = tensor_of(starts);
            }
            expect_ok(chiasma_gather_dequantize(&args, nullptr), what);
          };
          with([](Twin& twin) { return twin.host(); });
          with([](Twin& twin) { return twin.on_device(); });
          finish(what);
          expect_same(kv, what);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

struct TranslateShape {
  std::int64_t b, s_q, topk, max_pages, page;
  int world, rank, interleave;
  bool has_table, has_request, is_wide;
};

TEST_F(GpuCacheOps, TranslateGivesTheSlotsOfTheCpu) {
  const TranslateShape shapes[] = {
      {3, 2, 2048, 40, 64, 1, 0, 1, true, false, false},    {3, 2, 2048, 40, 64, 4, 3, 16, true, false, true},
      {2, 1, 2051, 9000, 1, 2, 1, 1, true, true, false},    {2, 3, 4096, 7, 61, 3, 0, 5, true, true, true},
      {1, 1, 5, 3, 64, 1, 0, 1, true, false, true},         {4, 2, 300, 0, 64, 1, 0, 1, true, false, false},
      {2, 2, 2048, 0, 1, 1, 0, 1, false, false, true},      {2, 2, 77, 0, 1, 1, 0, 1, false, false, false},
      {1, 300, 100, 5, 1 << 30, 1, 0, 1, true, true, true}, {70000, 1, 3, 2, 64, 1, 0, 1, true, false, false}};
  for (const TranslateShape& shape : shapes) {
    const std::string what = "b " + std::to_string(shape.b) + " topk " + std::to_string(shape.topk) + " world " +
                             std::to_string(shape.world);
    const std::int64_t pad = shape.topk % 4 == 0 ? 4 : 1;
    Twin indices(*device_, shape.is_wide ? CHIASMA_INT64 : CHIASMA_INT32, {shape.b, shape.s_q, shape.topk},
                 {shape.s_q * (shape.topk + pad), shape.topk + pad, 1});
    indices.fill_random(random_);
    const std::int64_t tokens = std::max<std::int64_t>(1, shape.max_pages * shape.page * shape.world);
    for (std::int64_t n = 0; n < shape.b * shape.s_q * shape.topk; ++n) {
      if (n % 9 == 0) continue;  // any bits
      const std::int64_t at = n / shape.topk * (shape.topk + pad) + n % shape.topk;
      const std::int64_t token = static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(tokens + 10));
      if (shape.is_wide) indices.data<std::int64_t>()[at] = token;
      if (!shape.is_wide) indices.data<std::int32_t>()[at] = static_cast<std::int32_t>(token);
    }
    const std::int64_t requests = shape.has_request ? 3 : shape.b;
    Twin table(*device_, CHIASMA_INT32, {requests, shape.max_pages}, {shape.max_pages + 1, 1});
    for (std::int64_t n = 0; n < requests * (shape.max_pages + 1) - 1 && shape.max_pages > 0; ++n) {
      table.data<std::int32_t>()[n] = n % 13 == 0 ? -1 : static_cast<std::int32_t>(random_() % 100000);
    }
    Twin request(*device_, CHIASMA_INT32, {shape.b});
    for (std::int64_t i = 0; i < shape.b; ++i) request.data<std::int32_t>()[i] = static_cast<std::int32_t>(i % 5) - 1;
    Twin slots(*device_, CHIASMA_INT32, {shape.b, shape.s_q, shape.topk});
    slots.fill_random(random_);
    for (Twin* twin : {&indices, &table, &request, &slots}) twin->upload();
    chiasma_translate_args args{};
    args.page = shape.page;
    args.cp_world = shape.world;
    args.cp_rank = shape.rank;
    args.cp_interleave = shape.interleave;
    const auto with = [&](auto&& tensor_of) {
      args.indices = tensor_of(indices);
      if (shape.has_table) args.block_table = tensor_of(table);
      if (shape.has_request) args.request = tensor_of(request);
      args.slots = tensor_of(slots);
      expect_ok(chiasma_translate_indices(&args, nullptr), what);
    };
    with([](Twin& twin) { return twin.host(); });
    with([](Twin& twin) { return twin.on_device(); });
    finish(what);
    expect_same(slots, what);
    if (shape.is_wide) continue;
    // The same in place.
    const auto in_place = [&](auto&& tensor_of) {
      args.indices = args.slots = tensor_of(indices);
      if (shape.has_table) args.block_table = tensor_of(table);
      if (shape.has_request) args.request = tensor_of(request);
      expect_ok(chiasma_translate_indices(&args, nullptr), what);
    };
    in_place([](Twin& twin) { return twin.host(); });
    in_place([](Twin& twin) { return twin.on_device(); });
    finish(what);
    expect_same(indices, what + " in place");
  }
}

TEST_F(GpuCacheOps, MergeGivesTheBitsOfTheCpu) {
  for (const std::int64_t parts : {1, 2, 3, 8, 33, 70}) {
    for (const bool from_bf16 : {false, true}) {
      for (const bool to_bf16 : {false, true}) {
        for (const bool is_odd : {false, true}) {
          constexpr std::int64_t kB = 3, kSq = 2, kHeads = 7;
          const std::string what = std::to_string(parts) + " parts" + (from_bf16 ? " bf16" : " float32") +
                                   (to_bf16 ? " to bf16" : "") + (is_odd ? " odd" : "");
          const std::int64_t row = 512 + (is_odd ? 3 : 8);
          Twin out(*device_, from_bf16 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, {parts, kB, kSq, kHeads, 512},
                   {kB * kSq * kHeads * row, row, kB * row, kSq * kB * row, 1}, is_odd ? 1 : 0);
          Twin lse(*device_, CHIASMA_FLOAT32, {parts, kB, kSq, kHeads});
          Twin result(*device_, to_bf16 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, {kB, kSq, kHeads, 512},
                      {kSq * kHeads * row, kHeads * row, row, 1}, is_odd ? 1 : 0);
          Twin result_lse(*device_, CHIASMA_FLOAT32, {kB, kSq, kHeads}, {kSq * kHeads, 1, kSq});
          // Any bits at all, NaN payloads among them, and ordinary numbers.
          for (Twin* twin : {&out, &lse, &result, &result_lse}) twin->fill_random(random_);
          const std::size_t size = out.bytes().size();
          for (std::size_t i = 0; i + 4 <= size && parts != 3; i += from_bf16 ? 2 : 4) {
            const float value = std::normal_distribution<float>(0, 3)(random_);
            std::uint32_t bits = 0;
            std::memcpy(&bits, &value, 4);
            if (from_bf16) bits >>= 16;
            std::memcpy(out.bytes().data() + i, &bits, from_bf16 ? 2 : 4);
          }
          constexpr float kInf = std::numeric_limits<float>::infinity();
          for (std::int64_t n = 0; n < parts * kB * kSq * kHeads; ++n) {
            const std::int64_t of_row = n % (kB * kSq * kHeads);
            const float special[] = {-kInf, kInf, std::nanf(""), 88.0f, -1e4f};
            float& value = lse.data<float>()[n];
            value = std::normal_distribution<float>(0, 5)(random_);
            if (of_row == 5) value = -kInf;  // all parts empty
            if (of_row > 30 && random_() % 3 == 0) value = special[random_() % 5];
            if (of_row < 30 && of_row > 20 && random_() % 2 == 0) value = -kInf;
          }
          for (Twin* twin : {&out, &lse, &result, &result_lse}) twin->upload();
          chiasma_merge_args args{};
          const auto with = [&](auto&& tensor_of) {
            args = {tensor_of(out), tensor_of(lse), tensor_of(result), tensor_of(result_lse), parts % 2 == 0 ? 1 : 0};
            expect_ok(chiasma_merge(&args, nullptr), what);
          };
          with([](Twin& twin) { return twin.host(); });
          with([](Twin& twin) { return twin.on_device(); });
          finish(what);
          expect_same(result_lse, what + " lse");
          expect_same(result, what);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Captured once, replayed after the inputs changed.
TEST_F(GpuCacheOps, OperationsCanBeRecorded) {
  Twin kv(*device_, CHIASMA_BFLOAT16, {100, 576});
  Twin cache(*device_, CHIASMA_UINT8, {2, 64, 656});
  Twin mapping(*device_, CHIASMA_INT64, {100});
  Twin rows(*device_, CHIASMA_BFLOAT16, {100, 576});
  Twin count(*device_, CHIASMA_INT64, {1});
  for (std::int64_t i = 0; i < 100; ++i) mapping.data<std::int64_t>()[i] = 127 - i;
  for (Twin* twin : {&kv, &cache, &mapping, &rows, &count}) twin->upload();
  chiasma_quantize_args store{};
  store.format = CHIASMA_KV_V32;
  store.scale = CHIASMA_SCALE_AMAX;
  chiasma_gather_args load{};
  load.format = CHIASMA_KV_V32;
  const auto run = [&](auto&& tensor_of, void* stream) {
    store.kv = tensor_of(kv);
    store.kv_cache = tensor_of(cache);
    store.slot_mapping = tensor_of(mapping);
    store.nonfinite_count = tensor_of(count);
    load.kv_cache = tensor_of(cache);
    load.slots = tensor_of(mapping);
    load.kv = tensor_of(rows);
    return chiasma_quantize(&store, stream) == CHIASMA_OK && chiasma_gather_dequantize(&load, stream) == CHIASMA_OK;
  };
  const std::unique_ptr<Queue> queue = device_->open_queue();
  std::string error;
  const auto recording =
      queue->record([&] { return run([](Twin& twin) { return twin.on_device(); }, queue->stream()); }, &error);
  ASSERT_NE(recording, nullptr) << error << chiasma_last_error();
  fill_values(kv, random_, 100, 576);
  kv.upload();
  queue->replay(*recording);
  ASSERT_TRUE(queue->synchronize(&error)) << error;
  ASSERT_TRUE(run([](Twin& twin) { return twin.host(); }, nullptr)) << chiasma_last_error();
  expect_same(cache, "cache");
  expect_same(rows, "rows");
  expect_same(count, "count");
}

}  // namespace
}  // namespace chiasma::harness
