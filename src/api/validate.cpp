#include "api/validate.h"

#include <cfloat>
#include <climits>
#include <cmath>
#include <utility>

#include "api/tensor_check.h"

namespace chiasma {
namespace {

constexpr int kMaxHeads = 128;

template <typename T>
T* data_as(const chiasma_tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

// A dimension of one element is never stepped along, and its stride may be anything; 0 keeps it out of all arithmetic.
std::int64_t stride_of(const chiasma_tensor& tensor, int dim) {
  return tensor.shape[dim] > 1 ? tensor.stride[dim] : 0;
}

Status require(NamedTensor argument) {
  if (!is_absent(argument.tensor)) return {};
  return invalid_argument(argument.name, " is absent (rank 0) but required");
}

Status check_format(chiasma_kv_format format) {
  if (is_known_format(format)) return {};
  return invalid_argument("format is ", static_cast<int>(format), "; allowed are v32 (1), v4 (2) and bf16 (3)");
}

Status check_quantized_format(chiasma_kv_format format) {
  if (format == CHIASMA_KV_V32 || format == CHIASMA_KV_V4) return {};
  return invalid_argument("format is ", static_cast<int>(format),
                          "; allowed are the quantised ones, v32 (1) and v4 (2)");
}

// Collapses [num_pages, page, 1, x] to [num_pages, page, x].
chiasma_tensor without_head_dim(const chiasma_tensor& cache) {
  chiasma_tensor flat = cache;
  if (cache.rank == 4 && cache.shape[2] == 1) {
    flat.rank = 3;
    flat.shape[2] = cache.shape[3];
    flat.stride[2] = cache.stride[3];
  }
  return flat;
}

Status check_cache(const char* name, const chiasma_tensor& given, KvFormat format, DataCheck data, KvPool* pool) {
  const chiasma_tensor tensor = without_head_dim(given);
  const NamedTensor argument{name, tensor};
  const bool is_bf16 = format == KvFormat::bf16;
  const char* shape_names = is_bf16                   ? "[num_pages, page, 576] or [num_pages, page, 1, 576]"
                            : format == KvFormat::v32 ? "[num_pages, page, 656] or [num_pages, page, 1, 656]"
                                                      : "[num_pages, page, 584] or [num_pages, page, 1, 584]";
  CHIASMA_RETURN_IF_ERROR(check_tensor(argument, {is_bf16 ? CHIASMA_BFLOAT16 : CHIASMA_UINT8},
                                       {kAnyExtent, kAnyExtent, token_extent(format)}, shape_names));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(argument));
  const auto [num_pages, page] = std::pair(tensor.shape[0], tensor.shape[1]);
  if (page < 1 || page > INT_MAX) {
    return invalid_argument(name, " has a page size of ", page, "; allowed are 1 to ", INT_MAX);
  }
  const std::int64_t element_bytes = dtype_bytes(tensor.dtype);
  if (num_pages > 0 && page > 1 && tensor.stride[1] != token_extent(format)) {
    return invalid_argument(name, " has stride(1) = ", tensor.stride[1], "; the rows of a page must be packed, ",
                            token_extent(format), " apart");
  }
  const std::int64_t min_bytes = min_page_bytes(format, static_cast<int>(page));
  std::int64_t page_stride_bytes = (min_bytes + kCacheAlignment - 1) / kCacheAlignment * kCacheAlignment;
  if (num_pages > 1) {
    page_stride_bytes = tensor.stride[0] * element_bytes;
    if (page_stride_bytes < min_bytes || page_stride_bytes % kCacheAlignment != 0) {
      return invalid_argument(name, " has a page stride of ", page_stride_bytes, " bytes; it must be a multiple of ",
                              kCacheAlignment, " and at least ", min_bytes, " (", page, " tokens)");
    }
  }
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(argument, kCacheAlignment));
  *pool = {data_as<const std::byte>(tensor), page_stride_bytes, num_pages, page};
  return {};
}

struct SelectionArguments {
  NamedTensor indices;
  NamedTensor length;
};

Status check_selection(const SelectionArguments& arguments, const DecodeProblem& problem, NamedTensor reference,
                       DataCheck data, Selection* selection) {
  const auto& [indices, length] = arguments;
  CHIASMA_RETURN_IF_ERROR(require(indices));
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(indices, {CHIASMA_INT32}, {problem.b, problem.s_q, kAnyExtent}, "[b, s_q, topk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(indices));
  CHIASMA_RETURN_IF_ERROR(check_same_device(indices, reference));
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(indices, alignof(std::int32_t)));
  const chiasma_tensor& tensor = indices.tensor;
  if (tensor.shape[2] > INT_MAX) {
    return invalid_argument(indices.name, " has topk = ", tensor.shape[2], "; at most ", INT_MAX, " is allowed");
  }
  *selection = {
      data_as<const std::int32_t>(tensor), stride_of(tensor, 0), stride_of(tensor, 1), tensor.shape[2], nullptr, 0, 0};
  if (is_absent(length.tensor)) return {};
  const bool for_each_query_token = length.tensor.rank == 2;
  CHIASMA_RETURN_IF_ERROR(for_each_query_token
                              ? check_tensor(length, {CHIASMA_INT32}, {problem.b, problem.s_q}, "[b, s_q]")
                              : check_tensor(length, {CHIASMA_INT32}, {problem.b}, "[b] or [b, s_q]"));
  CHIASMA_RETURN_IF_ERROR(check_same_device(length, reference));
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(length, alignof(std::int32_t)));
  selection->length = data_as<const std::int32_t>(length.tensor);
  selection->length_stride_b = stride_of(length.tensor, 0);
  selection->length_stride_s = for_each_query_token ? stride_of(length.tensor, 1) : 0;
  return {};
}

Status check_extra(const chiasma_decode_args& args, NamedTensor q, DataCheck data, DecodeProblem* problem) {
  problem->extra_kv = {};
  problem->extra_selection = {};
  const NamedTensor cache{"extra_kv_cache", args.extra_kv_cache};
  const NamedTensor indices{"extra_indices", args.extra_indices};
  const NamedTensor length{"extra_topk_length", args.extra_topk_length};
  if (is_absent(cache.tensor)) {
    for (const NamedTensor& orphan : {indices, length}) {
      if (!is_absent(orphan.tensor)) return invalid_argument(orphan.name, " is given, but extra_kv_cache is absent");
    }
    return {};
  }
  if (problem->format != KvFormat::v4) {
    return invalid_argument("extra_kv_cache is given with format ", format_name(problem->format), "; only v4 has one");
  }
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, problem->format, data, &problem->extra_kv));
  CHIASMA_RETURN_IF_ERROR(check_same_device(cache, q));
  return check_selection({indices, length}, *problem, q, data, &problem->extra_selection);
}

// The rotary columns of the query: a tensor of their own, or the last ones of q.
Status check_query_rope(NamedTensor rope, NamedTensor q, DataCheck data, DecodeProblem* problem) {
  problem->q_is_one_tensor = is_absent(rope.tensor);
  if (problem->q_is_one_tensor) {
    // Without data there is no address to step from.
    problem->q_rope = problem->q == nullptr ? nullptr : problem->q + (key_dim(problem->format) - kRopeDim);
    problem->q_rope_stride_b = problem->q_stride_b;
    problem->q_rope_stride_s = problem->q_stride_s;
    problem->q_rope_stride_h = problem->q_stride_h;
    return {};
  }
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(rope, {CHIASMA_BFLOAT16}, {problem->b, problem->s_q, problem->h_q, kRopeDim}, "[b, s_q, h_q, 64]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(rope));
  CHIASMA_RETURN_IF_ERROR(check_same_device(rope, q));
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(rope, alignof(bf16_t)));
  problem->q_rope = data_as<const bf16_t>(rope.tensor);
  problem->q_rope_stride_b = stride_of(rope.tensor, 0);
  problem->q_rope_stride_s = stride_of(rope.tensor, 1);
  problem->q_rope_stride_h = stride_of(rope.tensor, 2);
  return {};
}

Status check_queries(NamedTensor q, NamedTensor rope, DataCheck data, DecodeProblem* problem) {
  CHIASMA_RETURN_IF_ERROR(require(q));
  const bool has_rope = !is_absent(rope.tensor);
  CHIASMA_RETURN_IF_ERROR(check_tensor(
      q, {CHIASMA_BFLOAT16}, {kAnyExtent, kAnyExtent, kAnyExtent, key_dim(problem->format) - (has_rope ? kRopeDim : 0)},
      has_rope ? "[b, s_q, h_q, d_qk - 64] (as q_rope is given)" : "[b, s_q, h_q, d_qk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(q));
  const chiasma_tensor& tensor = q.tensor;
  if (tensor.shape[2] < 1 || tensor.shape[2] > kMaxHeads) {
    return invalid_argument("q has h_q = ", tensor.shape[2], " heads; allowed are 1 to ", kMaxHeads);
  }
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(q, alignof(bf16_t)));
  problem->b = tensor.shape[0];
  problem->s_q = tensor.shape[1];
  problem->h_q = static_cast<int>(tensor.shape[2]);
  problem->q = data_as<const bf16_t>(tensor);
  problem->q_stride_b = stride_of(tensor, 0);
  problem->q_stride_s = stride_of(tensor, 1);
  problem->q_stride_h = stride_of(tensor, 2);
  return check_query_rope(rope, q, data, problem);
}

Status check_inputs(const chiasma_decode_args* args, DataCheck data, DecodeProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  CHIASMA_RETURN_IF_ERROR(check_format(args->format));
  *problem = {};
  problem->format = static_cast<KvFormat>(args->format);
  if (!std::isfinite(args->sm_scale) || std::abs(args->sm_scale) > FLT_MAX) {
    return invalid_argument("sm_scale is ", args->sm_scale, "; it must be a finite float32 number");
  }
  problem->sm_scale = static_cast<float>(args->sm_scale);

  const NamedTensor q{"q", args->q};
  CHIASMA_RETURN_IF_ERROR(check_queries(q, {"q_rope", args->q_rope}, data, problem));
  const NamedTensor cache{"kv_cache", args->kv_cache};
  CHIASMA_RETURN_IF_ERROR(require(cache));
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, problem->format, data, &problem->kv));
  CHIASMA_RETURN_IF_ERROR(check_same_device(cache, q));
  CHIASMA_RETURN_IF_ERROR(check_selection({{"indices", args->indices}, {"topk_length", args->topk_length}}, *problem, q,
                                          data, &problem->selection));
  CHIASMA_RETURN_IF_ERROR(check_extra(*args, q, data, problem));

  const NamedTensor sink{"attn_sink", args->attn_sink};
  if (!is_absent(sink.tensor)) {
    CHIASMA_RETURN_IF_ERROR(check_tensor(sink, {CHIASMA_FLOAT32}, {problem->h_q}, "[h_q]"));
    CHIASMA_RETURN_IF_ERROR(check_same_device(sink, q));
    if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(sink, alignof(float)));
    problem->attn_sink = data_as<const float>(sink.tensor);
    problem->attn_sink_stride = stride_of(sink.tensor, 0);
  }
  return {};
}

Status check_output(NamedTensor output, NamedTensor reference, DataCheck data) {
  CHIASMA_RETURN_IF_ERROR(check_same_device(output, reference));
  CHIASMA_RETURN_IF_ERROR(check_no_self_overlap(output));
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_data(output, dtype_bytes(output.tensor.dtype)));
  return {};
}

Status check_outputs_disjoint(const chiasma_decode_args& args) {
  const NamedTensor inputs[] = {{"q", args.q},
                                {"q_rope", args.q_rope},
                                {"kv_cache", args.kv_cache},
                                {"indices", args.indices},
                                {"topk_length", args.topk_length},
                                {"attn_sink", args.attn_sink},
                                {"extra_kv_cache", args.extra_kv_cache},
                                {"extra_indices", args.extra_indices},
                                {"extra_topk_length", args.extra_topk_length}};
  for (const NamedTensor& input : inputs) {
    if (is_absent(input.tensor)) continue;
    CHIASMA_RETURN_IF_ERROR(check_disjoint({"out", args.out}, input));
    CHIASMA_RETURN_IF_ERROR(check_disjoint({"lse", args.lse}, input));
  }
  return check_disjoint({"lse", args.lse}, {"out", args.out});
}

}  // namespace

bool is_known_format(chiasma_kv_format format) {
  return format == CHIASMA_KV_V32 || format == CHIASMA_KV_V4 || format == CHIASMA_KV_BF16;
}

bool is_absent(const chiasma_tensor& tensor) {
  return tensor.rank == 0;
}

Status validate_oracle(const chiasma_decode_args* args, DecodeProblem* problem) {
  CHIASMA_RETURN_IF_ERROR(check_inputs(args, DataCheck::with_data, problem));
  if (args->q.device.kind != CHIASMA_CPU) {
    return invalid_argument("q is on ", device_text(args->q.device), "; the oracle takes cpu tensors only");
  }
  return {};
}

Status validate_decode(const chiasma_decode_args* args, DataCheck data, DecodeProblem* problem) {
  CHIASMA_RETURN_IF_ERROR(check_inputs(args, data, problem));
  const NamedTensor q{"q", args->q};
  const NamedTensor out{"out", args->out};
  const NamedTensor lse{"lse", args->lse};
  CHIASMA_RETURN_IF_ERROR(require(out));
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(out, {CHIASMA_BFLOAT16}, {problem->b, problem->s_q, problem->h_q, kValueDim}, "[b, s_q, h_q, 512]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(out));
  CHIASMA_RETURN_IF_ERROR(check_output(out, q, data));
  CHIASMA_RETURN_IF_ERROR(require(lse));
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(lse, {CHIASMA_FLOAT32}, {problem->b, problem->s_q, problem->h_q}, "[b, s_q, h_q]"));
  CHIASMA_RETURN_IF_ERROR(check_output(lse, q, data));
  if (data == DataCheck::with_data) CHIASMA_RETURN_IF_ERROR(check_outputs_disjoint(*args));
  problem->out = data_as<bf16_t>(out.tensor);
  problem->out_stride_b = stride_of(out.tensor, 0);
  problem->out_stride_s = stride_of(out.tensor, 1);
  problem->out_stride_h = stride_of(out.tensor, 2);
  problem->lse = data_as<float>(lse.tensor);
  problem->lse_stride_b = stride_of(lse.tensor, 0);
  problem->lse_stride_s = stride_of(lse.tensor, 1);
  problem->lse_stride_h = stride_of(lse.tensor, 2);
  return {};
}

Status validate_merge(const chiasma_merge_args* args, MergeProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  const NamedTensor part_out{"part_out", args->part_out};
  const NamedTensor part_lse{"part_lse", args->part_lse};
  const NamedTensor out{"out", args->out};
  const NamedTensor lse{"lse", args->lse};
  for (const NamedTensor& argument : {part_out, part_lse, out, lse}) CHIASMA_RETURN_IF_ERROR(require(argument));
  CHIASMA_RETURN_IF_ERROR(check_tensor(part_out, {CHIASMA_BFLOAT16, CHIASMA_FLOAT32},
                                       {kAnyExtent, kAnyExtent, kAnyExtent, kAnyExtent, kValueDim},
                                       "[parts, b, s_q, h_q, 512]"));
  const std::int64_t* shape = part_out.tensor.shape;
  if (shape[0] < 1) return invalid_argument("part_out has shape ", shape_text(part_out.tensor), "; parts must be >= 1");
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(part_lse, {CHIASMA_FLOAT32}, {shape[0], shape[1], shape[2], shape[3]}, "[parts, b, s_q, h_q]"));
  CHIASMA_RETURN_IF_ERROR(check_tensor(out, {CHIASMA_BFLOAT16, CHIASMA_FLOAT32},
                                       {shape[1], shape[2], shape[3], kValueDim}, "[b, s_q, h_q, 512]"));
  CHIASMA_RETURN_IF_ERROR(check_tensor(lse, {CHIASMA_FLOAT32}, {shape[1], shape[2], shape[3]}, "[b, s_q, h_q]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(part_out));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(out));
  CHIASMA_RETURN_IF_ERROR(check_same_device(part_lse, part_out));
  CHIASMA_RETURN_IF_ERROR(check_data(part_out, dtype_bytes(part_out.tensor.dtype)));
  CHIASMA_RETURN_IF_ERROR(check_data(part_lse, alignof(float)));
  for (const NamedTensor& output : {out, lse}) {
    CHIASMA_RETURN_IF_ERROR(check_output(output, part_out, DataCheck::with_data));
    CHIASMA_RETURN_IF_ERROR(check_disjoint(output, part_out));
    CHIASMA_RETURN_IF_ERROR(check_disjoint(output, part_lse));
  }
  CHIASMA_RETURN_IF_ERROR(check_disjoint(lse, out));
  *problem = {};
  problem->parts = shape[0];
  problem->b = shape[1];
  problem->s_q = shape[2];
  problem->h_q = shape[3];
  problem->part_out = part_out.tensor.data;
  problem->part_out_is_bf16 = part_out.tensor.dtype == CHIASMA_BFLOAT16;
  problem->part_lse = data_as<const float>(part_lse.tensor);
  problem->out = out.tensor.data;
  problem->out_is_bf16 = out.tensor.dtype == CHIASMA_BFLOAT16;
  problem->lse = data_as<float>(lse.tensor);
  for (int dim = 0; dim < 4; ++dim) {
    problem->part_out_stride[dim] = stride_of(part_out.tensor, dim);
    problem->part_lse_stride[dim] = stride_of(part_lse.tensor, dim);
  }
  for (int dim = 0; dim < 3; ++dim) {
    problem->out_stride[dim] = stride_of(out.tensor, dim);
    problem->lse_stride[dim] = stride_of(lse.tensor, dim);
  }
  return {};
}

Status validate_quantize(const chiasma_quantize_args* args, QuantizeProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  CHIASMA_RETURN_IF_ERROR(check_quantized_format(args->format));
  const auto format = static_cast<KvFormat>(args->format);
  const bool allows_amax = format != KvFormat::v4;
  if (args->scale != CHIASMA_SCALE_POW2 && !(args->scale == CHIASMA_SCALE_AMAX && allows_amax)) {
    return invalid_argument("scale is ", static_cast<int>(args->scale), "; format ", format_name(format), " allows ",
                            allows_amax ? "pow2 (1) and amax (2)" : "pow2 (1) only");
  }
  const NamedTensor kv{"kv", args->kv};
  const NamedTensor slots{"slot_mapping", args->slot_mapping};
  const NamedTensor cache{"kv_cache", args->kv_cache};
  const NamedTensor count{"nonfinite_count", args->nonfinite_count};
  CHIASMA_RETURN_IF_ERROR(require(kv));
  CHIASMA_RETURN_IF_ERROR(check_tensor(kv, {CHIASMA_BFLOAT16}, {kAnyExtent, key_dim(format)}, "[tokens, d_qk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(kv));
  CHIASMA_RETURN_IF_ERROR(check_data(kv, alignof(bf16_t)));
  CHIASMA_RETURN_IF_ERROR(require(cache));
  KvPool pool;
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, format, DataCheck::with_data, &pool));
  CHIASMA_RETURN_IF_ERROR(check_same_device(cache, kv));
  CHIASMA_RETURN_IF_ERROR(check_disjoint(cache, kv));
  *problem = {};
  problem->tokens = kv.tensor.shape[0];
  if (is_absent(slots.tensor)) {
    if (problem->tokens > pool.num_slots()) {
      return invalid_argument("kv has ", problem->tokens, " rows but kv_cache has ", pool.num_slots(),
                              " slots; without slot_mapping every row needs the slot of its own number");
    }
  } else {
    CHIASMA_RETURN_IF_ERROR(check_tensor(slots, {CHIASMA_INT64}, {problem->tokens}, "[tokens]"));
    CHIASMA_RETURN_IF_ERROR(check_same_device(slots, kv));
    CHIASMA_RETURN_IF_ERROR(check_data(slots, alignof(std::int64_t)));
    CHIASMA_RETURN_IF_ERROR(check_disjoint(cache, slots));
    problem->slot_mapping = data_as<const std::int64_t>(slots.tensor);
    problem->slot_mapping_stride = stride_of(slots.tensor, 0);
  }
  if (!is_absent(count.tensor)) {
    CHIASMA_RETURN_IF_ERROR(check_tensor(count, {CHIASMA_INT64}, {1}, "[1]"));
    CHIASMA_RETURN_IF_ERROR(check_same_device(count, kv));
    CHIASMA_RETURN_IF_ERROR(check_data(count, alignof(std::int64_t)));
    problem->nonfinite_count = data_as<std::int64_t>(count.tensor);
  }
  problem->format = format;
  problem->scale = static_cast<ScaleMode>(args->scale);
  problem->kv = data_as<const bf16_t>(kv.tensor);
  problem->kv_stride = stride_of(kv.tensor, 0);
  problem->cache = data_as<std::byte>(cache.tensor);
  problem->page_stride_bytes = pool.page_stride_bytes;
  problem->num_pages = pool.num_pages;
  problem->page_size = pool.page_size;
  return {};
}

Status validate_dequantize(const chiasma_dequantize_args* args, DequantizeProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  CHIASMA_RETURN_IF_ERROR(check_quantized_format(args->format));
  const auto format = static_cast<KvFormat>(args->format);
  const NamedTensor cache{"kv_cache", args->kv_cache};
  const NamedTensor kv{"kv", args->kv};
  *problem = {};
  problem->format = format;
  CHIASMA_RETURN_IF_ERROR(require(cache));
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, format, DataCheck::with_data, &problem->cache));
  CHIASMA_RETURN_IF_ERROR(require(kv));
  CHIASMA_RETURN_IF_ERROR(check_tensor(kv, {CHIASMA_FLOAT32, CHIASMA_BFLOAT16},
                                       {problem->cache.num_pages, problem->cache.page_size, key_dim(format)},
                                       "[num_pages, page, d_qk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(kv));
  CHIASMA_RETURN_IF_ERROR(check_output(kv, cache, DataCheck::with_data));
  CHIASMA_RETURN_IF_ERROR(check_disjoint(kv, cache));
  problem->kv = kv.tensor.data;
  problem->kv_is_bf16 = kv.tensor.dtype == CHIASMA_BFLOAT16;
  problem->kv_stride_page = stride_of(kv.tensor, 0);
  problem->kv_stride_token = stride_of(kv.tensor, 1);
  return {};
}

}  // namespace chiasma
