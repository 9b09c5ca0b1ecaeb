#include "harness/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/kv_format.h"
#include "format/numbers.h"
#include "harness/index_rows.h"
#include "harness/kv_pool.h"
#include "harness/parallel.h"
#include "harness/random.h"

namespace chiasma::harness {
namespace {

using Member = chiasma_tensor chiasma_decode_args::*;

// On both sides of every tensor.
constexpr std::int64_t kGuardBytes = 4096;
// A NaN as bf16 (0xFFC5) and as float32 (0xFFC5FFC5) that no arithmetic produces.
constexpr std::array<std::uint8_t, 2> kOutputPattern = {0xc5, 0xff};
constexpr int kNanByte = 0xff;
constexpr int kMaxRank = CHIASMA_MAX_RANK;

enum Stream : std::uint64_t { kPoolStream = 201, kExtraPoolStream, kQueryStream, kSinkStream };

std::int64_t element_bytes(chiasma_dtype dtype) {
  switch (dtype) {
    case CHIASMA_UINT8: return 1;
    case CHIASMA_BFLOAT16: return 2;
    case CHIASMA_INT32:
    case CHIASMA_FLOAT32: return 4;
    default: return 8;
  }
}

// How far a layout departs from packed, in elements.
struct Padding {
  std::int64_t last_stride = 1;  // distance of neighbours in the last dimension
  std::int64_t pad = 0;          // behind each run of every other dimension
  std::int64_t lead = 0;         // before the first element
  bool swapped = false;          // the first two dimensions change places in memory
};

// layout=strided keeps rows of 16-byte elements aligned; layout=odd keeps nothing but the alignment of one element.
Padding padding_of(Layout layout, chiasma_dtype dtype, bool last_contiguous) {
  const std::int64_t per_16_bytes = 16 / element_bytes(dtype);
  switch (layout) {
    case Layout::kPacked: return {};
    case Layout::kStrided: return {last_contiguous ? 1 : 2, per_16_bytes, per_16_bytes, true};
    case Layout::kOdd: return {last_contiguous ? 1 : 3, 3, 1, true};
  }
  return {};
}

// Sets the strides and returns how many elements the tensor spans, padding included.
std::int64_t set_strides(const Padding& padding, chiasma_tensor* tensor) {
  std::array<int, kMaxRank> order{};  // of the dimensions, slowest first
  for (int dim = 0; dim < tensor->rank; ++dim) order[static_cast<std::size_t>(dim)] = dim;
  if (padding.swapped && tensor->rank >= 3) std::swap(order[0], order[1]);
  std::int64_t span = padding.last_stride;
  for (int position = tensor->rank - 1; position >= 0; --position) {
    const int dim = order[static_cast<std::size_t>(position)];
    if (position < tensor->rank - 1) span += padding.pad;
    tensor->stride[dim] = span;
    span *= tensor->shape[dim];
  }
  return span;
}

template <typename T>
T& element(const chiasma_tensor& tensor, std::int64_t i, std::int64_t j = 0, std::int64_t k = 0, std::int64_t l = 0) {
  const std::int64_t at[] = {i, j, k, l};
  std::int64_t offset = 0;
  for (int dim = 0; dim < tensor.rank; ++dim) offset += at[dim] * tensor.stride[dim];
  return static_cast<T*>(tensor.data)[offset];
}

void fill_pattern(const Region& region) {
  for (std::size_t i = 0; i < region.bytes(); ++i) region.base()[i] = std::byte{kOutputPattern[i % 2]};
}

// A mask of the bytes of `region` that belong to elements of `tensor`.
std::vector<bool> element_mask(const Region& region, const chiasma_tensor& tensor) {
  std::vector<bool> mask(region.bytes());
  const std::int64_t bytes = element_bytes(tensor.dtype);
  const auto lead = static_cast<std::byte*>(tensor.data) - region.base();
  std::array<std::int64_t, kMaxRank> at{};
  std::int64_t count = 1;
  for (int dim = 0; dim < tensor.rank; ++dim) count *= tensor.shape[dim];
  for (std::int64_t n = 0; n < count; ++n) {
    std::int64_t offset = 0;
    for (int dim = 0; dim < tensor.rank; ++dim) offset += at[static_cast<std::size_t>(dim)] * tensor.stride[dim];
    for (std::int64_t byte = 0; byte < bytes; ++byte)
      mask[static_cast<std::size_t>(lead + offset * bytes + byte)] = true;
    for (int dim = tensor.rank - 1; dim >= 0; --dim) {
      if (++at[static_cast<std::size_t>(dim)] < tensor.shape[dim]) break;
      at[static_cast<std::size_t>(dim)] = 0;
    }
  }
  return mask;
}

struct SelectionMembers {
  Member cache, indices, length;
  const char *cache_name, *indices_name, *length_name;
};

constexpr SelectionMembers kMain = {&chiasma_decode_args::kv_cache,
                                    &chiasma_decode_args::indices,
                                    &chiasma_decode_args::topk_length,
                                    "kv_cache",
                                    "indices",
                                    "topk_length"};
constexpr SelectionMembers kExtra = {&chiasma_decode_args::extra_kv_cache,
                                     &chiasma_decode_args::extra_indices,
                                     &chiasma_decode_args::extra_topk_length,
                                     "extra_kv_cache",
                                     "extra_indices",
                                     "extra_topk_length"};

std::vector<std::int64_t> slots_of_row(const chiasma_decode_args& args, const SelectionMembers& members,
                                       std::int64_t row) {
  const std::int64_t s_q = args.q.shape[1];
  const chiasma_tensor& cache = args.*members.cache;
  const chiasma_tensor& indices = args.*members.indices;
  const chiasma_tensor& length = args.*members.length;
  std::vector<std::int64_t> slots;
  if (cache.rank == 0) return slots;
  std::int64_t num_entries = indices.shape[2];
  if (length.rank != 0) {
    num_entries = std::clamp<std::int64_t>(element<std::int32_t>(length, row / s_q, row % s_q), 0, num_entries);
  }
  for (std::int64_t entry = 0; entry < num_entries; ++entry) {
    const std::int64_t slot = element<std::int32_t>(indices, row / s_q, row % s_q, entry);
    if (slot >= 0 && slot < cache.shape[0] * cache.shape[1]) slots.push_back(slot);
  }
  return slots;
}

}  // namespace

class WorkloadBuilder {
 public:
  WorkloadBuilder(const Case& spec, Workload* workload) : spec_(spec), workload_(*workload), args_(workload->args_) {}

  bool build(std::string* error) {
    args_.format = spec_.fmt;
    args_.sm_scale = spec_.sm_scale();
    args_.kv_scale = spec_.kv_scale();
    const std::int64_t dim = key_dim(static_cast<KvFormat>(spec_.fmt)) - (spec_.q_pair ? kRopeDim : 0);
    bool ok =
        place({"q", &chiasma_decode_args::q, CHIASMA_BFLOAT16, {spec_.b, spec_.sq, spec_.h, dim}}, error) &&
        place({"out", &chiasma_decode_args::out, CHIASMA_BFLOAT16, {spec_.b, spec_.sq, spec_.h, kValueDim}, true},
              error) &&
        place({"lse", &chiasma_decode_args::lse, CHIASMA_FLOAT32, {spec_.b, spec_.sq, spec_.h}, true, false}, error);
    if (ok && spec_.q_pair) {
      ok = place({"q_rope", &chiasma_decode_args::q_rope, CHIASMA_BFLOAT16, {spec_.b, spec_.sq, spec_.h, kRopeDim}},
                 error);
    }
    if (ok && spec_.sink != SinkMode::kNone) {
      ok = place({"attn_sink", &chiasma_decode_args::attn_sink, CHIASMA_FLOAT32, {spec_.h}, false, false}, error);
    }
    const Source main = {spec_.pool, spec_.page, spec_.topk, spec_.len, kPoolStream};
    const Source extra = {spec_.xpool, spec_.xpage, spec_.xtopk, spec_.xlen, kExtraPoolStream};
    ok = ok && build_selection(kMain, main, error);
    if (ok && spec_.has_extra()) ok = build_selection(kExtra, extra, error);
    if (!ok) return false;
    fill_queries();
    if (spec_.sink != SinkMode::kNone) fill_sinks();
    workload_.reset_outputs();
    return true;
  }

 private:
  struct Plan {
    const char* name;
    Member member;
    chiasma_dtype dtype;
    std::vector<std::int64_t> shape;
    bool is_output = false;
    bool last_contiguous = true;
  };
  struct Source {
    std::int64_t pool, page, topk;
    LengthMode length;
    Stream stream;
  };

  bool place(const Plan& plan, std::string* error) {
    chiasma_tensor tensor = {};
    tensor.rank = static_cast<std::int32_t>(plan.shape.size());
    tensor.dtype = plan.dtype;
    tensor.device = {CHIASMA_CPU, 0};
    std::copy(plan.shape.begin(), plan.shape.end(), tensor.shape);
    const Padding padding = padding_of(spec_.layout, plan.dtype, plan.last_contiguous);
    const std::int64_t span = set_strides(padding, &tensor);
    return allocate(plan, padding.lead * element_bytes(plan.dtype), span * element_bytes(plan.dtype), tensor, error);
  }

  bool allocate(const Plan& plan, std::int64_t lead_bytes, std::int64_t span_bytes, chiasma_tensor tensor,
                std::string* error) {
    const std::int64_t bytes = kGuardBytes + lead_bytes + span_bytes + kGuardBytes;
    const std::int64_t limit = available_memory_bytes();
    Region region = {plan.name, plan.member, {}, plan.is_output};
    if (bytes <= limit) region.memory = HostBuffer(static_cast<std::size_t>(bytes));
    if (region.base() == nullptr) {
      *error = fmt::format("{} needs {} MB, but only {} MB of memory are free", plan.name, bytes >> 20, limit >> 20);
      return false;
    }
    tensor.data = region.base() + kGuardBytes + lead_bytes;
    args_.*plan.member = tensor;
    // Guards now, the rest by whoever fills the tensor: a large pool is written only once.
    std::memset(region.base(), kNanByte, static_cast<std::size_t>(kGuardBytes + lead_bytes));
    std::memset(region.base() + bytes - kGuardBytes, kNanByte, kGuardBytes);
    if (!plan.is_output && plan.member != &chiasma_decode_args::kv_cache &&
        plan.member != &chiasma_decode_args::extra_kv_cache) {
      std::memset(tensor.data, kNanByte, static_cast<std::size_t>(span_bytes));
    }
    workload_.regions_.push_back(std::move(region));
    return true;
  }

  bool build_selection(const SelectionMembers& members, const Source& source, std::string* error) {
    const auto format = static_cast<KvFormat>(spec_.fmt);
    PoolLayout layout = {spec_.b, source.pool, source.page, derive(spec_.seed, source.stream), 0};
    layout.page_stride_bytes = chiasma_kv_page_bytes(spec_.fmt, source.page);
    constexpr std::int64_t kPagePadding = 5 * kCacheAlignment;
    if (spec_.layout != Layout::kPacked) layout.page_stride_bytes += kPagePadding;

    if (!place_cache(members, layout, format, error)) return false;
    if (!place({members.indices_name, members.indices, CHIASMA_INT32, {spec_.b, spec_.sq, source.topk}}, error))
      return false;
    fill_indices(args_.*members.indices, workload_.regions_.back(), layout, source.topk);
    if (source.length != LengthMode::kNone) {
      const std::int64_t lengths_of_request = source.length == LengthMode::kRows ? spec_.sq : 1;
      std::vector<std::int64_t> shape = {spec_.b};
      if (source.length == LengthMode::kRows) shape.push_back(spec_.sq);
      if (!place({members.length_name, members.length, CHIASMA_INT32, shape, false, false}, error)) return false;
      for (std::int64_t n = 0; n < spec_.b * lengths_of_request; ++n) {
        element<std::int32_t>(args_.*members.length, n / lengths_of_request, n % lengths_of_request) =
            make_length(source.length, layout.key, n, source.topk);
      }
    }
    std::vector<bool> selected;
    if (spec_.poison == Poison::kNan) selected = find_selected(members, layout);
    return fill_pool(spec_, layout, spec_.poison == Poison::kNan ? &selected : nullptr,
                     static_cast<std::byte*>((args_.*members.cache).data), error);
  }

  // Packed caches have three dimensions, the others also show the head dimension of 1.
  bool place_cache(const SelectionMembers& members, const PoolLayout& layout, KvFormat format, std::string* error) {
    const chiasma_dtype dtype = traits_of(format).is_quantized() ? CHIASMA_UINT8 : CHIASMA_BFLOAT16;
    const std::int64_t extent = token_extent(format);
    chiasma_tensor tensor = {};
    tensor.dtype = dtype;
    tensor.device = {CHIASMA_CPU, 0};
    tensor.rank = spec_.layout == Layout::kPacked ? 3 : 4;
    const std::int64_t shape[] = {layout.num_pages(), layout.page, 1, extent};
    const std::int64_t stride[] = {layout.page_stride_bytes / element_bytes(dtype), extent, extent, 1};
    for (int dim = 0; dim < tensor.rank; ++dim) {
      const int from = tensor.rank == 3 && dim == 2 ? 3 : dim;
      tensor.shape[dim] = shape[from];
      tensor.stride[dim] = stride[from];
    }
    const std::int64_t lead_bytes = spec_.layout == Layout::kPacked ? 0 : kCacheAlignment;
    return allocate({members.cache_name, members.cache, dtype, {}}, lead_bytes, layout.total_bytes(), tensor, error);
  }

  void fill_indices(const chiasma_tensor& indices, const Region& region, const PoolLayout& layout, std::int64_t topk) {
    // Whoever reads past a row finds valid indices, of slots that hold NaN.
    const auto spare = static_cast<std::int32_t>(layout.spare_slot());
    auto* begin = reinterpret_cast<std::int32_t*>(region.base());
    std::fill(begin, begin + region.bytes() / sizeof(std::int32_t), spare);
    parallel_ranges(spec_.num_rows(), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t row = first; row < last; ++row) {
        make_index_row(spec_, layout, row / spec_.sq, row, topk,
                       &element<std::int32_t>(indices, row / spec_.sq, row % spec_.sq));
      }
    });
  }

  std::vector<bool> find_selected(const SelectionMembers& members, const PoolLayout& layout) const {
    std::vector<bool> selected(static_cast<std::size_t>(layout.num_slots()));
    for (std::int64_t row = 0; row < spec_.num_rows(); ++row) {
      for (const std::int64_t slot : slots_of_row(args_, members, row)) {
        selected[static_cast<std::size_t>(slot)] = true;
      }
    }
    return selected;
  }

  void fill_queries() {
    // dist=const: with the rows' constants of 0.5 to 2.25 scores stay between 0.375 and 1.7.
    constexpr float kConstQuery = 0x1p-5f;
    constexpr std::int64_t kOneInNan = 3;
    const std::uint64_t key = derive(spec_.seed, kQueryStream);
    const auto scale = static_cast<float>(spec_.qscale);
    const std::int64_t dim = key_dim(static_cast<KvFormat>(spec_.fmt));
    const std::int64_t columns_of_q = args_.q.shape[3];  // all, or those in front of q_rope
    parallel_ranges(spec_.num_rows() * spec_.h, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        const std::int64_t row = n / spec_.h;
        bf16_t* q = &element<bf16_t>(args_.q, row / spec_.sq, row % spec_.sq, n % spec_.h);
        bf16_t* rope =
            spec_.q_pair ? &element<bf16_t>(args_.q_rope, row / spec_.sq, row % spec_.sq, n % spec_.h) : nullptr;
        for (std::int64_t c = 0; c < dim; ++c) {
          const float value = spec_.dist == Distribution::kConst ? kConstQuery : gauss(key, n * dim + c);
          (c < columns_of_q ? q[c] : rope[c - columns_of_q]) = to_bf16(scale * value);
        }
        const bool is_nan =
            spec_.qnan == QueryNan::kAll || (spec_.qnan == QueryNan::kSome && n % kOneInNan == kOneInNan - 1);
        if (is_nan) q[n % columns_of_q] = bf16_t{0x7fc0};
      }
    });
  }

  float sink_of_head(std::int64_t head) const {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    switch (spec_.sink) {
      case SinkMode::kNone:
      case SinkMode::kZero: return 0.0f;
      case SinkMode::kPlusInf: return kInfinity;
      case SinkMode::kMinusInf: return -kInfinity;
      case SinkMode::kRandom: break;
    }
    // Around the usual lse of some thousand entries, with a few infinities among them.
    constexpr std::uint64_t kOneInInfinite = 16;
    const std::uint64_t key = derive(derive(spec_.seed, kSinkStream), head);
    switch (below(key, 0, kOneInInfinite)) {
      case 0: return kInfinity;
      case 1: return -kInfinity;
      default: return 4.0f + 4.0f * gauss(key, 1);
    }
  }

  void fill_sinks() {
    for (std::int64_t head = 0; head < spec_.h; ++head) element<float>(args_.attn_sink, head) = sink_of_head(head);
  }

  const Case& spec_;
  Workload& workload_;
  chiasma_decode_args& args_;
};

std::unique_ptr<Workload> Workload::make(const Case& spec, std::string* error) {
  if (!validate_case(spec, error)) return nullptr;
  std::unique_ptr<Workload> workload(new Workload);
  workload->spec_ = spec;
  if (!WorkloadBuilder(workload->spec_, workload.get()).build(error)) return nullptr;
  return workload;
}

std::size_t Workload::total_bytes() const {
  std::size_t bytes = 0;
  for (const Region& region : regions_) bytes += region.bytes();
  return bytes;
}

void Workload::reset_outputs() {
  for (const Region& region : regions_) {
    if (region.is_output) fill_pattern(region);
  }
}

bool Workload::guards_intact(std::string* where) const {
  for (const Region& region : regions_) {
    if (!region.is_output) continue;
    const std::vector<bool> mask = element_mask(region, args_.*region.tensor);
    for (std::size_t i = 0; i < region.bytes(); ++i) {
      if (mask[i] || region.base()[i] == std::byte{kOutputPattern[i % 2]}) continue;
      const auto from_data = region.base() + i - static_cast<std::byte*>((args_.*region.tensor).data);
      *where = fmt::format("{}: byte {} from the tensor's start is outside its elements, but was overwritten",
                           region.name, from_data);
      return false;
    }
  }
  return true;
}

std::vector<std::int64_t> selected_slots(const chiasma_decode_args& args, std::int64_t row, bool extra) {
  return slots_of_row(args, extra ? kExtra : kMain, row);
}

}  // namespace chiasma::harness
