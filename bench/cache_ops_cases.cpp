#include "bench/cache_ops_cases.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>

#include "chiasma/chiasma.hpp"

namespace chiasma::bench {
namespace {

using harness::Device;
using harness::DeviceBlock;

constexpr std::int64_t kPage = 64;
constexpr std::int64_t kCheckedRows = 512;

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(cudaGetLastError()));
}

template <typename T>
std::int64_t bytes_of(const std::vector<T>& values) {
  return static_cast<std::int64_t>(values.size() * sizeof(T));
}

DeviceBlock allocate(Device& device, std::int64_t bytes) {
  DeviceBlock block = device.allocate(static_cast<std::size_t>(bytes));
  require(block != nullptr, "not enough device memory");
  return block;
}

template <typename T>
DeviceBlock upload(Device& device, const std::vector<T>& values) {
  DeviceBlock block = allocate(device, bytes_of(values));
  require(device.copy_to_device(block.get(), reinterpret_cast<const std::byte*>(values.data()),
                                static_cast<std::size_t>(bytes_of(values))),
          "copying an input");
  return block;
}

// `bytes` of device memory that repeat a pattern. Patterns are larger than a device's L2, so that a repetition is no
// hit.
template <typename T>
DeviceBlock upload_repeated(Device& device, const std::vector<T>& pattern, std::int64_t bytes) {
  const DeviceBlock once = upload(device, pattern);
  DeviceBlock block = allocate(device, bytes);
  for (std::int64_t at = 0; at < bytes; at += bytes_of(pattern)) {
    const std::int64_t count = std::min(bytes_of(pattern), bytes - at);
    require(cudaMemcpy(block.get() + at, once.get(), static_cast<std::size_t>(count), cudaMemcpyDeviceToDevice) ==
                cudaSuccess,
            "repeating an input");
  }
  return block;
}

template <typename T>
std::vector<T> download(Device& device, const DeviceBlock& block, std::int64_t count) {
  std::vector<T> values(static_cast<std::size_t>(count));
  require(device.copy_to_host(reinterpret_cast<std::byte*>(values.data()), block.get(), values.size() * sizeof(T)),
          "copying a result");
  return values;
}

// bf16 of magnitudes from 2^-7 to 2^4 with either sign.
std::vector<std::uint16_t> random_bf16(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); i += 4) {
    const std::uint64_t bits = random();
    for (std::size_t n = i; n < std::min(i + 4, values.size()); ++n) {
      const auto half = static_cast<std::uint32_t>(bits >> (n - i) * 16 & 0xffffu);
      values[n] = static_cast<std::uint16_t>((half & 0x807fu) | (120u + (half >> 7 & 0xffu) % 11u) << 7);
    }
  }
  return values;
}

std::vector<std::int64_t> random_slots(std::int64_t count) {
  std::vector<std::int64_t> slots(static_cast<std::size_t>(count));
  std::iota(slots.begin(), slots.end(), std::int64_t{0});
  std::shuffle(slots.begin(), slots.end(), std::mt19937_64(7));
  return slots;
}

// ---- rows and caches ----

struct Rows {
  static constexpr std::int64_t kPatternRows = 65536;  // 64 MB and more
  chiasma_kv_format format;
  chiasma_scale_mode mode = CHIASMA_SCALE_POW2;
  std::vector<std::uint16_t> pattern;

  Rows(chiasma_kv_format kv_format, chiasma_scale_mode scale)
      : format(kv_format), mode(scale), pattern(random_bf16(kPatternRows * dim(), 3)) {}

  std::int64_t dim() const { return chiasma_kv_dim(format); }
  std::int64_t cache_bytes(std::int64_t slots) const { return chiasma_kv_page_bytes(format, kPage) * slots / kPage; }

  chiasma_tensor cache(void* data, chiasma_device device, std::int64_t slots) const {
    chiasma_tensor cache = tensor(data, CHIASMA_UINT8, device, {slots / kPage, kPage, chiasma_kv_width(format)});
    cache.stride[0] = chiasma_kv_page_bytes(format, kPage);
    return cache;
  }

  chiasma_quantize_args quantize_args(const void* kv, const chiasma_tensor& cache, std::int64_t tokens) const {
    chiasma_quantize_args args{};
    args.format = format;
    args.scale = mode;
    args.kv = tensor(kv, CHIASMA_BFLOAT16, cache.device, {tokens, dim()});
    args.kv_cache = cache;
    return args;
  }

  // What rows of the pattern are once they were quantised, by the CPU.
  template <typename Out>
  std::vector<Out> expected(const std::vector<std::int64_t>& numbers) const {
    const auto count = static_cast<std::int64_t>(numbers.size());
    std::vector<std::uint16_t> kv;
    for (const std::int64_t number : numbers) {
      const auto row = pattern.begin() + number % kPatternRows * dim();
      kv.insert(kv.end(), row, row + dim());
    }
    struct alignas(16) Vector {
      std::byte bytes[16];
    };
    std::vector<Vector> storage(static_cast<std::size_t>(cache_bytes(count)) / 16);
    const chiasma_quantize_args store = quantize_args(kv.data(), cache(storage.data(), kCpu, count), count);
    check(chiasma_quantize(&store, nullptr));
    std::vector<std::int64_t> slots(numbers.size());
    std::iota(slots.begin(), slots.end(), std::int64_t{0});
    std::vector<Out> out(static_cast<std::size_t>(count * dim()));
    chiasma_gather_args args{};
    args.format = format;
    args.kv_cache = cache(storage.data(), kCpu, count);
    args.slots = tensor(slots.data(), CHIASMA_INT64, kCpu, {count});
    args.kv = tensor(out.data(), sizeof(Out) == 2 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32, kCpu, {count, dim()});
    check(chiasma_gather_dequantize(&args, nullptr));
    return out;
  }
};

template <typename Out>
bool starts_with(Device& device, const DeviceBlock& block, const std::vector<Out>& expected) {
  const std::vector<Out> found = download<Out>(device, block, static_cast<std::int64_t>(expected.size()));
  return std::memcmp(found.data(), expected.data(), found.size() * sizeof(Out)) == 0;
}

struct QuantizeShape {
  const char* name;
  chiasma_kv_format format;
  chiasma_scale_mode mode;
  bool is_split, in_order;
};

CacheCase quantize_case(Device& device, const QuantizeShape& shape) {
  constexpr std::int64_t kTokens = std::int64_t{1} << 20;
  const auto rows = std::make_shared<Rows>(shape.format, shape.mode);
  const std::int64_t dim = rows->dim();
  const auto slots = std::make_shared<std::vector<std::int64_t>>(random_slots(kTokens));
  if (shape.in_order) std::iota(slots->begin(), slots->end(), std::int64_t{0});
  const DeviceBlock kv = upload_repeated(device, rows->pattern, kTokens * dim * 2);
  const DeviceBlock mapping = upload(device, *slots);
  const DeviceBlock cache = allocate(device, rows->cache_bytes(kTokens));
  const chiasma_tensor cache_tensor = rows->cache(cache.get(), device.id(), kTokens);
  chiasma_quantize_args args = rows->quantize_args(kv.get(), cache_tensor, kTokens);
  args.slot_mapping = tensor(mapping.get(), CHIASMA_INT64, device.id(), {kTokens});
  if (shape.is_split) {
    // Both parts with the joined rows' stride: the same bytes, two addresses a row.
    constexpr std::int64_t kRope = 64;
    args.rope = args.kv;
    args.rope.data = kv.get() + (dim - kRope) * 2;
    args.rope.shape[1] = kRope;
    args.kv.shape[1] = dim - kRope;
  }
  CacheCase made{shape.name, "quantize_kernel", 0, {}, {}};
  made.bytes = static_cast<double>(kTokens) * static_cast<double>(dim * 2 + chiasma_kv_width(shape.format) + 8);
  made.launch = [args, kv, mapping, cache] { return chiasma_quantize(&args, nullptr); };
  made.is_right = [rows, slots, mapping, cache_tensor, &device, dim] {
    const DeviceBlock out = allocate(device, kCheckedRows * dim * 4);
    chiasma_gather_args gather{};
    gather.format = rows->format;
    gather.kv_cache = cache_tensor;
    gather.slots = tensor(mapping.get(), CHIASMA_INT64, device.id(), {kCheckedRows});
    gather.kv = tensor(out.get(), CHIASMA_FLOAT32, device.id(), {kCheckedRows, dim});
    check(chiasma_gather_dequantize(&gather, nullptr));
    std::vector<std::int64_t> numbers(kCheckedRows);
    std::iota(numbers.begin(), numbers.end(), std::int64_t{0});
    return starts_with(device, out, rows->expected<float>(numbers));
  };
  return made;
}

// A cache on the device that holds the pattern's rows, over and over.
DeviceBlock filled_cache(Device& device, const Rows& rows, std::int64_t slots) {
  const DeviceBlock kv = upload_repeated(device, rows.pattern, slots * rows.dim() * 2);
  DeviceBlock cache = allocate(device, rows.cache_bytes(slots));
  const chiasma_quantize_args args = rows.quantize_args(kv.get(), rows.cache(cache.get(), device.id(), slots), slots);
  check(chiasma_quantize(&args, nullptr));
  std::string error;
  if (!device.synchronize(&error)) throw std::runtime_error(error);
  return cache;
}

enum class Source { slots, table, all };

struct GatherShape {
  const char* name;
  chiasma_kv_format format;
  Source source;
  bool to_bf16;
};

template <typename Out>
CacheCase gather_case(Device& device, const GatherShape& shape) {
  constexpr std::int64_t kRows = std::int64_t{1} << 20;
  constexpr std::int64_t kRequests = 64, kLength = kRows / kRequests, kPages = kLength / kPage;
  const std::int64_t num_slots = shape.source == Source::all ? kRows : 2 * kRows;
  const auto rows = std::make_shared<Rows>(shape.format, CHIASMA_SCALE_POW2);
  const std::int64_t dim = rows->dim();
  const chiasma_dtype dtype = sizeof(Out) == 2 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32;
  const DeviceBlock cache = filled_cache(device, *rows, num_slots);
  const chiasma_tensor cache_tensor = rows->cache(cache.get(), device.id(), num_slots);
  const DeviceBlock kv = allocate(device, kRows * dim * static_cast<std::int64_t>(sizeof(Out)));
  std::vector<std::int64_t> first(kCheckedRows);  // slots of the first rows
  std::iota(first.begin(), first.end(), std::int64_t{0});
  double integer_bytes = 0;
  CacheCase made{shape.name, "dequantize_kernel", 0, {}, {}};
  if (shape.source == Source::all) {
    chiasma_dequantize_args args{};
    args.format = shape.format;
    args.kv_cache = cache_tensor;
    args.kv = tensor(kv.get(), dtype, device.id(), {kRows / kPage, kPage, dim});
    made.launch = [args, cache, kv] { return chiasma_dequantize(&args, nullptr); };
  } else {
    chiasma_gather_args args{};
    args.format = shape.format;
    args.kv_cache = cache_tensor;
    args.kv = tensor(kv.get(), dtype, device.id(), {kRows, dim});
    std::vector<DeviceBlock> held = {cache, kv};
    if (shape.source == Source::slots) {
      made.kernel = "gather_slots_kernel";
      std::vector<std::int64_t> slots = random_slots(num_slots);
      slots.resize(kRows);
      std::copy_n(slots.begin(), kCheckedRows, first.begin());
      held.push_back(upload(device, slots));
      args.slots = tensor(held.back().get(), CHIASMA_INT64, device.id(), {kRows});
      integer_bytes = static_cast<double>(bytes_of(slots));
    } else {
      made.kernel = "gather_pages_kernel";
      const std::vector<std::int64_t> pages = random_slots(num_slots / kPage);
      const std::vector<std::int32_t> table(pages.begin(), pages.begin() + kRequests * kPages);
      std::vector<std::int64_t> starts(kRequests);
      for (std::int64_t i = 0; i < kRequests; ++i) starts[static_cast<std::size_t>(i)] = i * kLength;
      for (std::int64_t& slot : first) {
        slot = table[static_cast<std::size_t>(slot / kPage)] * kPage + slot % kPage;
      }
      held.push_back(upload(device, table));
      args.block_table = tensor(held.back().get(), CHIASMA_INT32, device.id(), {kRequests, kPages});
      held.push_back(upload(device, std::vector<std::int32_t>(kRequests, kLength)));
      args.seq_lens = tensor(held.back().get(), CHIASMA_INT32, device.id(), {kRequests});
      held.push_back(upload(device, starts));
      args.starts = tensor(held.back().get(), CHIASMA_INT64, device.id(), {kRequests});
      integer_bytes = static_cast<double>(bytes_of(table) + kRequests * 12);
    }
    made.launch = [args, held] { return chiasma_gather_dequantize(&args, nullptr); };
  }
  made.bytes = static_cast<double>(kRows) *
                   static_cast<double>(chiasma_kv_width(shape.format) + dim * static_cast<std::int64_t>(sizeof(Out))) +
               integer_bytes;
  made.is_right = [rows, first, kv, &device] { return starts_with(device, kv, rows->template expected<Out>(first)); };
  return made;
}

// ---- indices ----

struct TranslateShape {
  const char* name;
  int world, interleave;
};

template <typename Index>
CacheCase translate_case(Device& device, const TranslateShape& shape) {
  constexpr std::int64_t kTokens = 65536, kTopk = 2048, kRequests = 64, kPages = 512, kChecked = 8;
  constexpr std::int64_t kPatternRows = 16384;
  std::mt19937_64 random(11);
  const std::int64_t reach = kPages * kPage * shape.world;
  const auto pattern = std::make_shared<std::vector<Index>>(static_cast<std::size_t>(kPatternRows * kTopk));
  for (Index& index : *pattern) {
    const std::uint64_t bits = random();
    index = bits % 16 == 0 ? Index{-1} : static_cast<Index>((bits >> 4) % static_cast<std::uint64_t>(reach));
  }
  const auto table = std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(kRequests * kPages));
  for (std::int32_t& page : *table) page = static_cast<std::int32_t>(random() % 1'000'000);
  const auto request = std::make_shared<std::vector<std::int32_t>>(static_cast<std::size_t>(kTokens));
  for (std::size_t i = 0; i < request->size(); ++i) (*request)[i] = static_cast<std::int32_t>(i * kRequests / kTokens);

  constexpr chiasma_dtype kDtype = sizeof(Index) == 8 ? CHIASMA_INT64 : CHIASMA_INT32;
  constexpr std::int64_t kIndexBytes = sizeof(Index);
  const auto args_for = [=](chiasma_device place, const void* indices, const void* pages, const void* requests,
                            void* slots, std::int64_t tokens) {
    chiasma_translate_args args{};
    args.indices = tensor(indices, kDtype, place, {tokens, 1, kTopk});
    args.block_table = tensor(pages, CHIASMA_INT32, place, {kRequests, kPages});
    args.request = tensor(requests, CHIASMA_INT32, place, {tokens});
    args.page = kPage;
    args.cp_world = shape.world;
    args.cp_rank = shape.world - 1;
    args.cp_interleave = shape.interleave;
    args.slots = tensor(slots, CHIASMA_INT32, place, {tokens, 1, kTopk});
    return args;
  };
  const DeviceBlock indices = upload_repeated(device, *pattern, kTokens * kTopk * kIndexBytes);
  const DeviceBlock pages = upload(device, *table), requests = upload(device, *request);
  const DeviceBlock slots = allocate(device, kTokens * kTopk * 4);
  const chiasma_translate_args args =
      args_for(device.id(), indices.get(), pages.get(), requests.get(), slots.get(), kTokens);
  CacheCase made{shape.name, "translate_kernel", 0, {}, {}};
  made.bytes = static_cast<double>(kTokens * kTopk * (kIndexBytes + 4) + bytes_of(*table) + bytes_of(*request));
  made.launch = [args, indices, pages, requests, slots] { return chiasma_translate_indices(&args, nullptr); };
  made.is_right = [=, &device] {
    std::vector<std::int32_t> expected(static_cast<std::size_t>(kChecked * kTopk));
    const chiasma_translate_args host =
        args_for(kCpu, pattern->data(), table->data(), request->data(), expected.data(), kChecked);
    check(chiasma_translate_indices(&host, nullptr));
    return starts_with(device, slots, expected);
  };
  return made;
}

// ---- merge ----

template <typename Value>
CacheCase merge_case(Device& device, const char* name) {
  constexpr std::int64_t kParts = 4, kTokens = 16384, kHeads = 16, kDim = 512, kChecked = 8;
  constexpr std::int64_t kPartValues = kTokens * kHeads * kDim;
  constexpr bool kIsBf16 = sizeof(Value) == 2;
  constexpr chiasma_dtype kDtype = kIsBf16 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32;
  // Not a divisor of a part, so that parts differ.
  constexpr std::int64_t kPattern = 32'000'001;
  const auto pattern = std::make_shared<std::vector<Value>>();
  for (const std::uint16_t bits : random_bf16(kPattern, 5)) {
    const std::uint32_t wide = std::uint32_t{bits} << 16 | 0x5a5au;
    if constexpr (kIsBf16) pattern->push_back(bits);
    if constexpr (!kIsBf16) pattern->push_back(std::bit_cast<float>(wide));
  }
  const auto lse = std::make_shared<std::vector<float>>(static_cast<std::size_t>(kParts * kTokens * kHeads));
  std::mt19937_64 random(13);
  for (float& value : *lse) value = std::normal_distribution<float>(8.0f, 2.0f)(random);

  const DeviceBlock part_out = upload_repeated(device, *pattern, kParts * kPartValues * std::int64_t{sizeof(Value)});
  const DeviceBlock part_lse = upload(device, *lse);
  const DeviceBlock out = allocate(device, kPartValues * std::int64_t{sizeof(Value)});
  const DeviceBlock out_lse = allocate(device, kTokens * kHeads * 4);
  const chiasma_merge_args args = {tensor(part_out.get(), kDtype, device.id(), {kParts, kTokens, 1, kHeads, kDim}),
                                   tensor(part_lse.get(), CHIASMA_FLOAT32, device.id(), {kParts, kTokens, 1, kHeads}),
                                   tensor(out.get(), kDtype, device.id(), {kTokens, 1, kHeads, kDim}),
                                   tensor(out_lse.get(), CHIASMA_FLOAT32, device.id(), {kTokens, 1, kHeads}), 0};
  CacheCase made{name, "merge_kernel", 0, {}, {}};
  made.bytes = static_cast<double>((kParts + 1) * kTokens * kHeads) * static_cast<double>(kDim * sizeof(Value) + 4);
  made.launch = [args, part_out, part_lse, out, out_lse] { return chiasma_merge(&args, nullptr); };
  made.is_right = [=, &device] {
    constexpr std::int64_t kCheckedValues = kChecked * kHeads * kDim;
    std::vector<Value> parts;
    std::vector<float> lses, merged_lse(static_cast<std::size_t>(kChecked * kHeads));
    for (std::int64_t part = 0; part < kParts; ++part) {
      for (std::int64_t i = 0; i < kCheckedValues; ++i) {
        parts.push_back((*pattern)[static_cast<std::size_t>((part * kPartValues + i) % kPattern)]);
      }
      const auto first = lse->begin() + part * kTokens * kHeads;
      lses.insert(lses.end(), first, first + kChecked * kHeads);
    }
    std::vector<Value> merged(static_cast<std::size_t>(kCheckedValues));
    const chiasma_merge_args host = {tensor(parts.data(), kDtype, kCpu, {kParts, kChecked, 1, kHeads, kDim}),
                                     tensor(lses.data(), CHIASMA_FLOAT32, kCpu, {kParts, kChecked, 1, kHeads}),
                                     tensor(merged.data(), kDtype, kCpu, {kChecked, 1, kHeads, kDim}),
                                     tensor(merged_lse.data(), CHIASMA_FLOAT32, kCpu, {kChecked, 1, kHeads}), 0};
    check(chiasma_merge(&host, nullptr));
    return starts_with(device, out, merged) && starts_with(device, out_lse, merged_lse);
  };
  return made;
}

template <typename Make, typename Shape>
CaseMaker maker(Make make, const Shape& shape) {
  return {shape.name, [make, shape](Device& device) { return make(device, shape); }};
}

}  // namespace

std::vector<CaseMaker> cache_cases() {
  constexpr auto kPow2 = CHIASMA_SCALE_POW2, kAmax = CHIASMA_SCALE_AMAX;
  const QuantizeShape quantize[] = {
      {"quantize v32 pow2, random slots", CHIASMA_KV_V32, kPow2, false, false},
      {"quantize v32 pow2, slots in order", CHIASMA_KV_V32, kPow2, false, true},
      {"quantize v32 pow2, RoPE apart", CHIASMA_KV_V32, kPow2, true, false},
      {"quantize v32 amax, random slots", CHIASMA_KV_V32, kAmax, false, false},
      {"quantize v4 pow2, random slots", CHIASMA_KV_V4, kPow2, false, false},
      {"quantize v41 pow2, random slots", CHIASMA_KV_V41, kPow2, false, false},
  };
  const GatherShape gather[] = {
      {"gather v32 to bf16, random slots", CHIASMA_KV_V32, Source::slots, true},
      {"gather v32 to bf16, block table", CHIASMA_KV_V32, Source::table, true},
      {"gather v32 to float32, random slots", CHIASMA_KV_V32, Source::slots, false},
      {"gather v4 to bf16, random slots", CHIASMA_KV_V4, Source::slots, true},
      {"gather v41 to bf16, random slots", CHIASMA_KV_V41, Source::slots, true},
      {"dequantize v32 to bf16", CHIASMA_KV_V32, Source::all, true},
  };
  const TranslateShape translate32 = {"translate int32", 1, 1};
  const TranslateShape translate64 = {"translate int64", 1, 1};
  const TranslateShape dealt_out = {"translate int32, 4 ranks", 4, 16};
  std::vector<CaseMaker> makers;
  for (const QuantizeShape& shape : quantize) makers.push_back(maker(quantize_case, shape));
  for (const GatherShape& shape : gather) {
    makers.push_back(shape.to_bf16 ? maker(gather_case<std::uint16_t>, shape) : maker(gather_case<float>, shape));
  }
  makers.push_back(maker(translate_case<std::int32_t>, translate32));
  makers.push_back(maker(translate_case<std::int64_t>, translate64));
  makers.push_back(maker(translate_case<std::int32_t>, dealt_out));
  for (const char* name : {"merge 4 parts, float32", "merge 4 parts, bf16"}) {
    const bool is_bf16 = std::strstr(name, "bf16") != nullptr;
    makers.push_back({name, [name, is_bf16](Device& device) {
                        return is_bf16 ? merge_case<std::uint16_t>(device, name) : merge_case<float>(device, name);
                      }});
  }
  return makers;
}

}  // namespace chiasma::bench
