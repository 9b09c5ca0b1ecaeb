#include "cli/decode_input.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "cli/cache_tensor.h"
#include "cli/error.h"
#include "cli/input_parts.h"
#include "cli/near_miss.h"
#include "format/kv_format.h"
#include "format/numbers.h"

namespace chiasma::cli {
namespace {

// Of the widest elements that are not converted, int32 and float32.
constexpr std::size_t kElementAlignment = 4;

constexpr const char* kCacheName = "kv_cache";
constexpr const char* kExtraCacheName = "extra_kv_cache";
constexpr const char* kScaleName = "sm_scale";

constexpr std::array<std::string_view, 10> kNames = {
    "q",         "q_rope",        kCacheName,      "indices",           "topk_length",
    "attn_sink", kExtraCacheName, "extra_indices", "extra_topk_length", kScaleName};

// Element i of a tensor whose dtype is one of these.
float element_as_float(const SafetensorsTensor& tensor, std::size_t i) {
  const auto load = [&]<typename T>(T value) {
    std::memcpy(&value, tensor.data.data() + i * sizeof value, sizeof value);
    return value;
  };
  if (tensor.dtype == Dtype::kF32) return load(0.0f);
  if (tensor.dtype == Dtype::kF16) return half_to_float(load(std::uint16_t{0}));
  return to_float(load(bf16_t{}));
}

bool is_convertible(Dtype dtype) {
  return dtype == Dtype::kF32 || dtype == Dtype::kF16 || dtype == Dtype::kBF16;
}

// Behind the first dimension, one of extent 1.
void insert_dimension(chiasma_tensor& tensor) {
  std::array<std::int64_t, CHIASMA_MAX_RANK> shape{tensor.shape[0], 1};
  std::copy(tensor.shape + 1, tensor.shape + tensor.rank, shape.begin() + 2);
  tensor = chiasma_contiguous(tensor.data, tensor.dtype, tensor.device, tensor.rank + 1, shape.data());
}

}  // namespace

DecodeInput::DecodeInput(const SafetensorsFile& file, const DecodeInputOptions& options)
    : file_(file), cast_(options.cast) {
  const CacheTensor cache = read_cache(file, kCacheName, "page");
  args_.format = cache.format;
  args_.sm_scale = choose_sm_scale(options.sm_scale);
  args_.kv_scale = read_kv_scale(file, cache.format);
  require(file, "q");
  require(file, "indices");
  add(&chiasma_decode_args::kv_cache, cache.tensor, cache.bytes);
  add_plain("q", Dtype::kBF16, &chiasma_decode_args::q);
  add_plain("q_rope", Dtype::kBF16, &chiasma_decode_args::q_rope);
  add_integers("indices", &chiasma_decode_args::indices, num_slots(cache.tensor));
  add_integers("topk_length", &chiasma_decode_args::topk_length, 0);
  add_plain("attn_sink", Dtype::kF32, &chiasma_decode_args::attn_sink);
  std::int64_t extra_slots = 0;
  if (file.find(kExtraCacheName) != nullptr) {
    const CacheTensor extra = read_cache(file, kExtraCacheName, "extra_page");
    if (extra.format != cache.format) {
      fail_input("{}: {} is a {} cache, but {} is {}", file.path(), kExtraCacheName,
                 format_name(static_cast<KvFormat>(extra.format)), kCacheName,
                 format_name(static_cast<KvFormat>(cache.format)));
    }
    extra_slots = num_slots(extra.tensor);
    add(&chiasma_decode_args::extra_kv_cache, extra.tensor, extra.bytes);
  }
  add_integers("extra_indices", &chiasma_decode_args::extra_indices, extra_slots);
  add_integers("extra_topk_length", &chiasma_decode_args::extra_topk_length, 0);
  unify_shapes();
  check_query_width();
  find_unused();
}

// People leave out the dimension of query tokens where there is one of each request, and have it in lengths where
// there are several.
void DecodeInput::unify_shapes() {
  is_flat_ = args_.q.rank == 3;
  if (is_flat_) insert_dimension(args_.q);
  if (args_.q_rope.rank == 3) insert_dimension(args_.q_rope);
  for (chiasma_tensor* indices : {&args_.indices, &args_.extra_indices}) {
    if (indices->rank == 2 && args_.q.rank == 4 && args_.q.shape[1] == 1) insert_dimension(*indices);
  }
  for (chiasma_tensor* length : {&args_.topk_length, &args_.extra_topk_length}) {
    if (length->rank == 2 && length->shape[1] == 1) length->rank = 1;
  }
}

void DecodeInput::check_query_width() const {
  const std::int64_t width = chiasma_kv_dim(args_.format) - (args_.q_rope.rank != 0 ? kRopeDim : 0);
  if (args_.q.rank != 4 || args_.q.shape[3] == width) return;
  std::string fitting;
  for (const KvFormat format : kAllFormats) {
    if (key_dim(format) - (args_.q_rope.rank != 0 ? kRopeDim : 0) != args_.q.shape[3]) continue;
    fitting += (fitting.empty() ? "" : ", ") + std::string(format_name(format));
  }
  fail_input("{}: q is {}; queries of a {} cache{} are {} wide; {}", file_.path(), describe(require(file_, "q")),
             chiasma_kv_format_name(args_.format), args_.q_rope.rank != 0 ? " beside q_rope" : "", width,
             fitting.empty() ? "no format has this width" : "this width have " + fitting);
}

void DecodeInput::add(chiasma_tensor chiasma_decode_args::*member, chiasma_tensor tensor,
                      std::span<const std::byte> bytes) {
  // Caches are used where they lie, however large; the other tensors are small and need their elements aligned.
  const bool is_cache = member == &chiasma_decode_args::kv_cache || member == &chiasma_decode_args::extra_kv_cache;
  const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % kElementAlignment == 0;
  if (!is_cache && !is_aligned && !bytes.empty()) {
    copies_.emplace_back((bytes.size() + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
    std::memcpy(copies_.back().data(), bytes.data(), bytes.size());
    tensor.data = copies_.back().data();
  }
  args_.*member = tensor;
  tensors_.push_back({member, bytes.size()});
}

void DecodeInput::add_plain(const std::string& name, Dtype dtype, chiasma_tensor chiasma_decode_args::*member) {
  const SafetensorsTensor* tensor = file_.find(name);
  if (tensor == nullptr) return;
  if (tensor->dtype != dtype) {
    if (cast_ && is_convertible(tensor->dtype)) return convert(*tensor, dtype, member);
    fail_input("{}: {} is {}; must be {}: {}convert it, in PyTorch with {}", file_.path(), name, describe(*tensor),
               dtype_name(dtype), is_convertible(tensor->dtype) ? "give --cast, or " : "",
               dtype == Dtype::kBF16 ? ".bfloat16()" : ".float()");
  }
  add(member, cpu_tensor(file_, *tensor, dtype == Dtype::kBF16 ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32), tensor->data);
}

void DecodeInput::convert(const SafetensorsTensor& tensor, Dtype dtype, chiasma_tensor chiasma_decode_args::*member) {
  const std::size_t count = tensor.data.size() / static_cast<std::size_t>(dtype_bits(tensor.dtype) / 8);
  const bool to_bf16s = dtype == Dtype::kBF16;
  const std::size_t bytes = count * (to_bf16s ? sizeof(bf16_t) : sizeof(float));
  copies_.emplace_back((bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  auto* to = reinterpret_cast<std::byte*>(copies_.back().data());
  for (std::size_t i = 0; i < count; ++i) {
    const float value = element_as_float(tensor, i);
    const bf16_t rounded = to_bf16(value);
    if (to_bf16s) std::memcpy(to + i * sizeof rounded, &rounded, sizeof rounded);
    if (!to_bf16s) std::memcpy(to + i * sizeof value, &value, sizeof value);
  }
  chiasma_tensor converted = cpu_tensor(file_, tensor, to_bf16s ? CHIASMA_BFLOAT16 : CHIASMA_FLOAT32);
  converted.data = to;
  args_.*member = converted;
  tensors_.push_back({member, bytes});
  conversions_.push_back(
      fmt::format("{}: {} is {}; converted to {}", file_.path(), tensor.name, describe(tensor), dtype_name(dtype)));
}

// int64 becomes int32. num_slots: indices from there on select nothing, so that any of them may become -1; 0 for
// lengths, which count only up to topk.
void DecodeInput::add_integers(const std::string& name, chiasma_tensor chiasma_decode_args::*member,
                               std::int64_t num_slots) {
  const SafetensorsTensor* tensor = file_.find(name);
  if (tensor == nullptr) return;
  if (tensor->dtype == Dtype::kI32) return add(member, cpu_tensor(file_, *tensor, CHIASMA_INT32), tensor->data);
  if (tensor->dtype != Dtype::kI64) {
    fail_input("{}: {} is {}; must be I32 or I64: convert it, in PyTorch with .int()", file_.path(), name,
               describe(*tensor));
  }
  const bool is_length =
      member == &chiasma_decode_args::topk_length || member == &chiasma_decode_args::extra_topk_length;
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  const std::size_t count = tensor->data.size() / sizeof(std::int64_t);
  copies_.emplace_back((count * sizeof(std::int32_t) + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t));
  auto* converted = reinterpret_cast<std::int32_t*>(copies_.back().data());
  for (std::size_t i = 0; i < count; ++i) {
    std::int64_t value = 0;
    std::memcpy(&value, tensor->data.data() + i * sizeof value, sizeof value);
    if (value > kMax && value < num_slots) {
      fail_input("{}: {} has the slot {}; slots beyond {} cannot be addressed", file_.path(), name, value, kMax);
    }
    if (is_length) value = std::clamp<std::int64_t>(value, 0, kMax);
    converted[i] = value < 0 || value > kMax ? -1 : static_cast<std::int32_t>(value);
  }
  chiasma_tensor shape = cpu_tensor(file_, *tensor, CHIASMA_INT32);
  shape.data = converted;
  args_.*member = shape;
  tensors_.push_back({member, count * sizeof(std::int32_t)});
}

double DecodeInput::choose_sm_scale(std::optional<double> given) {
  if (given) return *given;
  if (const SafetensorsTensor* tensor = file_.find(kScaleName)) return number_of(file_, *tensor);
  if (const std::string* text = find_metadata(file_, kScaleName)) {
    const std::optional<double> value = parse_loosely(*text);
    if (!value) {
      fail_input("{}: metadata \"{}\" is \"{}\"; must be a number", file_.path(), kScaleName, printable(*text));
    }
    return *value;
  }
  constexpr std::array<std::string_view, 1> kScaleNames = {kScaleName};
  for (const auto& [key, value] : file_.metadata()) {
    if (meant_by(key, kScaleNames).empty()) continue;
    fail_input("{}: metadata \"{}\" is not read; did you mean \"{}\"? Rename it, or give --sm-scale", file_.path(),
               printable(key), kScaleName);
  }
  const double scale = chiasma_default_sm_scale(args_.format);
  notes_.push_back(
      fmt::format("{} has no {}; taken is d_qk^-1/2 = {:.6g}, which is no model's exactly: give metadata \"{}\" or "
                  "--sm-scale",
                  file_.path(), kScaleName, scale, kScaleName));
  return scale;
}

void DecodeInput::find_unused() {
  for (const SafetensorsTensor& tensor : file_.tensors()) {
    if (std::ranges::find(kNames, tensor.name) != kNames.end()) continue;
    const std::string meant = meant_by(tensor.name, kNames);
    notes_.push_back(fmt::format("{}: decode does not use the tensor {}{}", file_.path(), printable(tensor.name),
                                 meant.empty() ? "" : fmt::format("; did you mean {}?", meant)));
  }
}

}  // namespace chiasma::cli
