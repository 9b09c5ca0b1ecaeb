// The checks of merge and of the cache operations.
#include <climits>

#include "api/validate.h"
#include "api/validate_parts.h"

namespace chiasma {
namespace {

// A matrix of rows of bf16 numbers, last dimension contiguous.
Status check_bf16_rows(NamedTensor argument, std::int64_t rows, std::int64_t columns, const char* shape_names) {
  CHIASMA_RETURN_IF_ERROR(require(argument));
  CHIASMA_RETURN_IF_ERROR(check_tensor(argument, {CHIASMA_BFLOAT16}, {rows, columns}, shape_names));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(argument));
  return check_data(argument, alignof(bf16_t));
}

// An input of integers next to `reference`.
Status check_integers(NamedTensor argument, std::initializer_list<chiasma_dtype> dtypes,
                      std::initializer_list<std::int64_t> expected, const char* shape_names, NamedTensor reference) {
  CHIASMA_RETURN_IF_ERROR(check_tensor(argument, dtypes, expected, shape_names));
  CHIASMA_RETURN_IF_ERROR(check_same_device(argument, reference));
  return check_data(argument, dtype_bytes(argument.tensor.dtype));
}

IntegerView view_of(const chiasma_tensor& tensor) {
  return {tensor.data, tensor.dtype == CHIASMA_INT64, stride_of(tensor, 0)};
}

// Columns of kv and, where they are a tensor of their own, the rotary ones.
Status check_new_rows(const chiasma_quantize_args& args, QuantizeProblem* problem) {
  const NamedTensor kv{"kv", args.kv};
  const NamedTensor rope{"rope", args.rope};
  const int dim = key_dim(problem->format);
  const bool has_rope = !is_absent(rope.tensor);
  if (has_rope && !traits_of(problem->format).has_rope) {
    return invalid_argument("rope is given with format ", format_name(problem->format),
                            ", which has no rotary columns");
  }
  CHIASMA_RETURN_IF_ERROR(check_bf16_rows(kv, kAnyExtent, has_rope ? dim - kRopeDim : dim,
                                          has_rope ? "[tokens, d_qk - 64] (as rope is given)" : "[tokens, d_qk]"));
  problem->tokens = kv.tensor.shape[0];
  problem->kv = data_as<const bf16_t>(kv.tensor);
  problem->kv_stride = stride_of(kv.tensor, 0);
  problem->rope = problem->kv == nullptr ? nullptr : problem->kv + (dim - kRopeDim);
  problem->rope_stride = problem->kv_stride;
  if (!has_rope) return {};
  CHIASMA_RETURN_IF_ERROR(check_bf16_rows(rope, problem->tokens, kRopeDim, "[tokens, 64]"));
  CHIASMA_RETURN_IF_ERROR(check_same_device(rope, kv));
  problem->rope = data_as<const bf16_t>(rope.tensor);
  problem->rope_stride = stride_of(rope.tensor, 0);
  return {};
}

Status check_scale_mode(chiasma_scale_mode mode, KvFormat format) {
  const ScaleType type = traits_of(format).scale_type;
  if (type == ScaleType::none || type == ScaleType::cache) return {};
  const bool allows_amax = type == ScaleType::float32;
  if (mode == CHIASMA_SCALE_POW2 || (mode == CHIASMA_SCALE_AMAX && allows_amax)) return {};
  return invalid_argument("scale is ", static_cast<int>(mode), "; format ", format_name(format), " allows ",
                          allows_amax ? "pow2 (1) and amax (2)" : "pow2 (1) only");
}

// What the quantiser counts, each in memory of its own.
Status check_counts(const chiasma_quantize_args& args, QuantizeProblem* problem) {
  const NamedTensor kv{"kv", args.kv};
  const NamedTensor nonfinite{"nonfinite_count", args.nonfinite_count};
  const NamedTensor skipped{"skipped_count", args.skipped_count};
  for (const NamedTensor& count : {nonfinite, skipped}) {
    if (is_absent(count.tensor)) continue;
    CHIASMA_RETURN_IF_ERROR(check_integers(count, {CHIASMA_INT64}, {1}, "[1]", kv));
    for (const NamedTensor& other : {kv, NamedTensor{"rope", args.rope}, NamedTensor{"slot_mapping", args.slot_mapping},
                                     NamedTensor{"kv_cache", args.kv_cache}}) {
      if (!is_absent(other.tensor)) CHIASMA_RETURN_IF_ERROR(check_disjoint(count, other));
    }
  }
  if (!is_absent(nonfinite.tensor) && !is_absent(skipped.tensor)) {
    CHIASMA_RETURN_IF_ERROR(check_disjoint(skipped, nonfinite));
  }
  problem->nonfinite_count = is_absent(nonfinite.tensor) ? nullptr : data_as<std::int64_t>(nonfinite.tensor);
  problem->skipped_count = is_absent(skipped.tensor) ? nullptr : data_as<std::int64_t>(skipped.tensor);
  return {};
}

Status check_paged_rows(const chiasma_gather_args& args, NamedTensor cache, GatherProblem* problem) {
  const NamedTensor table{"block_table", args.block_table};
  const NamedTensor seq_lens{"seq_lens", args.seq_lens};
  const NamedTensor starts{"starts", args.starts};
  CHIASMA_RETURN_IF_ERROR(require(seq_lens));
  CHIASMA_RETURN_IF_ERROR(require(starts));
  CHIASMA_RETURN_IF_ERROR(check_integers(table, {CHIASMA_INT32}, {kAnyExtent, kAnyExtent}, "[b, max_pages]", cache));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(table));
  problem->b = table.tensor.shape[0];
  problem->max_pages = table.tensor.shape[1];
  CHIASMA_RETURN_IF_ERROR(check_integers(seq_lens, {CHIASMA_INT32}, {problem->b}, "[b]", cache));
  CHIASMA_RETURN_IF_ERROR(check_integers(starts, {CHIASMA_INT32, CHIASMA_INT64}, {problem->b}, "[b]", cache));
  problem->block_table = data_as<const std::int32_t>(table.tensor);
  problem->block_table_stride = stride_of(table.tensor, 0);
  problem->seq_lens = data_as<const std::int32_t>(seq_lens.tensor);
  problem->seq_lens_stride = stride_of(seq_lens.tensor, 0);
  problem->starts = view_of(starts.tensor);
  return {};
}

// Which rows: slots, or block_table with seq_lens and starts.
Status check_gathered_rows(const chiasma_gather_args& args, NamedTensor cache, GatherProblem* problem) {
  const NamedTensor slots{"slots", args.slots};
  const NamedTensor of_table[] = {
      {"block_table", args.block_table}, {"seq_lens", args.seq_lens}, {"starts", args.starts}};
  if (is_absent(slots.tensor)) {
    if (is_absent(args.block_table))
      return invalid_argument("slots and block_table are absent; one of them is required");
    return check_paged_rows(args, cache, problem);
  }
  for (const NamedTensor& other : of_table) {
    if (!is_absent(other.tensor))
      return invalid_argument(other.name, " is given beside slots; only one way is allowed");
  }
  CHIASMA_RETURN_IF_ERROR(check_integers(slots, {CHIASMA_INT32, CHIASMA_INT64}, {problem->rows}, "[rows]", cache));
  problem->slots = view_of(slots.tensor);
  // An empty tensor may have no address, and null means another thing.
  static const std::int64_t kNone = 0;
  if (problem->slots.data == nullptr) problem->slots.data = &kNone;
  return {};
}

Status check_translate_table(const chiasma_translate_args& args, NamedTensor indices, TranslateProblem* problem) {
  const NamedTensor table{"block_table", args.block_table};
  const NamedTensor request{"request", args.request};
  problem->page_size = problem->cp_world = problem->cp_interleave = 1;
  if (is_absent(table.tensor)) {
    if (!is_absent(request.tensor)) return invalid_argument("request is given, but block_table is absent");
    if (args.cp_world > 1) return invalid_argument("cp_world is ", args.cp_world, ", but block_table is absent");
    return {};
  }
  CHIASMA_RETURN_IF_ERROR(
      check_integers(table, {CHIASMA_INT32}, {kAnyExtent, kAnyExtent}, "[requests, max_pages]", indices));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(table));
  problem->requests = table.tensor.shape[0];
  problem->max_pages = table.tensor.shape[1];
  if (!is_absent(request.tensor)) {
    CHIASMA_RETURN_IF_ERROR(check_integers(request, {CHIASMA_INT32}, {problem->b}, "[b]", indices));
    problem->request = data_as<const std::int32_t>(request.tensor);
    problem->request_stride = stride_of(request.tensor, 0);
  } else if (problem->requests != problem->b) {
    return invalid_argument("block_table has ", problem->requests, " rows and indices is for ", problem->b,
                            " requests; without request these must be equal");
  }
  if (args.page < 1 || args.page > INT_MAX) {
    return invalid_argument("page is ", args.page, "; allowed are 1 to ", INT_MAX);
  }
  problem->page_size = args.page;
  problem->cp_world = args.cp_world < 1 ? 1 : args.cp_world;
  problem->cp_rank = args.cp_rank;
  problem->cp_interleave = args.cp_interleave < 1 ? 1 : args.cp_interleave;
  if (args.cp_world < 0) return invalid_argument("cp_world is ", args.cp_world, "; it must be >= 0");
  if (args.cp_interleave < 0) return invalid_argument("cp_interleave is ", args.cp_interleave, "; it must be >= 0");
  if (args.cp_rank < 0 || args.cp_rank >= problem->cp_world) {
    return invalid_argument("cp_rank is ", args.cp_rank, "; allowed are 0 to ", problem->cp_world - 1);
  }
  static const std::int32_t kNone = 0;
  problem->block_table = data_as<const std::int32_t>(table.tensor);
  if (problem->block_table == nullptr) problem->block_table = &kNone;
  problem->block_table_stride = stride_of(table.tensor, 0);
  return {};
}

}  // namespace

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
  problem->plus_infinity_is_empty = args->plus_infinity_is_empty != 0;
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
  CHIASMA_RETURN_IF_ERROR(check_format(args->format));
  *problem = {};
  problem->format = static_cast<KvFormat>(args->format);
  CHIASMA_RETURN_IF_ERROR(check_scale_mode(args->scale, problem->format));
  problem->scale = args->scale == CHIASMA_SCALE_AMAX ? ScaleMode::amax : ScaleMode::pow2;
  CHIASMA_RETURN_IF_ERROR(check_new_rows(*args, problem));
  const NamedTensor kv{"kv", args->kv};
  const NamedTensor rope{"rope", args->rope};
  const NamedTensor slots{"slot_mapping", args->slot_mapping};
  const NamedTensor cache{"kv_cache", args->kv_cache};
  CHIASMA_RETURN_IF_ERROR(require(cache));
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, problem->format, DataCheck::with_data, &problem->pool));
  CHIASMA_RETURN_IF_ERROR(check_kv_scale(args->kv_scale, problem->format, &problem->pool.scale));
  CHIASMA_RETURN_IF_ERROR(check_same_device(cache, kv));
  CHIASMA_RETURN_IF_ERROR(check_disjoint(cache, kv));
  if (!is_absent(rope.tensor)) CHIASMA_RETURN_IF_ERROR(check_disjoint(cache, rope));
  problem->cache = data_as<std::byte>(cache.tensor);
  if (is_absent(slots.tensor)) {
    if (problem->tokens > problem->pool.num_slots()) {
      return invalid_argument("kv has ", problem->tokens, " rows but kv_cache has ", problem->pool.num_slots(),
                              " slots; without slot_mapping every row needs the slot of its own number");
    }
  } else {
    CHIASMA_RETURN_IF_ERROR(check_integers(slots, {CHIASMA_INT64}, {problem->tokens}, "[tokens]", kv));
    CHIASMA_RETURN_IF_ERROR(check_disjoint(cache, slots));
    problem->slot_mapping = data_as<const std::int64_t>(slots.tensor);
    problem->slot_mapping_stride = stride_of(slots.tensor, 0);
  }
  return check_counts(*args, problem);
}

Status validate_dequantize(const chiasma_dequantize_args* args, DequantizeProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  CHIASMA_RETURN_IF_ERROR(check_format(args->format));
  const auto format = static_cast<KvFormat>(args->format);
  const NamedTensor cache{"kv_cache", args->kv_cache};
  const NamedTensor kv{"kv", args->kv};
  *problem = {};
  problem->format = format;
  CHIASMA_RETURN_IF_ERROR(require(cache));
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, format, DataCheck::with_data, &problem->cache));
  CHIASMA_RETURN_IF_ERROR(check_kv_scale(args->kv_scale, format, &problem->cache.scale));
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

Status validate_gather(const chiasma_gather_args* args, GatherProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  CHIASMA_RETURN_IF_ERROR(check_format(args->format));
  const NamedTensor cache{"kv_cache", args->kv_cache};
  const NamedTensor kv{"kv", args->kv};
  *problem = {};
  problem->format = static_cast<KvFormat>(args->format);
  CHIASMA_RETURN_IF_ERROR(require(cache));
  CHIASMA_RETURN_IF_ERROR(
      check_cache(cache.name, cache.tensor, problem->format, DataCheck::with_data, &problem->cache));
  CHIASMA_RETURN_IF_ERROR(check_kv_scale(args->kv_scale, problem->format, &problem->cache.scale));
  CHIASMA_RETURN_IF_ERROR(require(kv));
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(kv, {CHIASMA_FLOAT32, CHIASMA_BFLOAT16}, {kAnyExtent, key_dim(problem->format)}, "[rows, d_qk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(kv));
  CHIASMA_RETURN_IF_ERROR(check_output(kv, cache, DataCheck::with_data));
  problem->rows = kv.tensor.shape[0];
  problem->kv = kv.tensor.data;
  problem->kv_is_bf16 = kv.tensor.dtype == CHIASMA_BFLOAT16;
  problem->kv_stride = stride_of(kv.tensor, 0);
  CHIASMA_RETURN_IF_ERROR(check_gathered_rows(*args, cache, problem));
  const NamedTensor inputs[] = {cache,
                                {"slots", args->slots},
                                {"block_table", args->block_table},
                                {"seq_lens", args->seq_lens},
                                {"starts", args->starts}};
  for (const NamedTensor& input : inputs) {
    if (!is_absent(input.tensor)) CHIASMA_RETURN_IF_ERROR(check_disjoint(kv, input));
  }
  return {};
}

Status validate_translate(const chiasma_translate_args* args, TranslateProblem* problem) {
  if (args == nullptr) return invalid_argument("args is NULL");
  const NamedTensor indices{"indices", args->indices};
  const NamedTensor slots{"slots", args->slots};
  CHIASMA_RETURN_IF_ERROR(require(indices));
  CHIASMA_RETURN_IF_ERROR(
      check_tensor(indices, {CHIASMA_INT32, CHIASMA_INT64}, {kAnyExtent, kAnyExtent, kAnyExtent}, "[b, s_q, topk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(indices));
  CHIASMA_RETURN_IF_ERROR(check_data(indices, dtype_bytes(indices.tensor.dtype)));
  const std::int64_t* shape = indices.tensor.shape;
  *problem = {};
  problem->b = shape[0];
  problem->s_q = shape[1];
  problem->topk = shape[2];
  problem->indices = indices.tensor.data;
  problem->indices_are_int64 = indices.tensor.dtype == CHIASMA_INT64;
  problem->indices_stride_b = stride_of(indices.tensor, 0);
  problem->indices_stride_s = stride_of(indices.tensor, 1);
  CHIASMA_RETURN_IF_ERROR(require(slots));
  CHIASMA_RETURN_IF_ERROR(check_tensor(slots, {CHIASMA_INT32}, {shape[0], shape[1], shape[2]}, "[b, s_q, topk]"));
  CHIASMA_RETURN_IF_ERROR(check_last_contiguous(slots));
  CHIASMA_RETURN_IF_ERROR(check_output(slots, indices, DataCheck::with_data));
  problem->slots = data_as<std::int32_t>(slots.tensor);
  problem->slots_stride_b = stride_of(slots.tensor, 0);
  problem->slots_stride_s = stride_of(slots.tensor, 1);
  CHIASMA_RETURN_IF_ERROR(check_translate_table(*args, indices, problem));
  const bool in_place = slots.tensor.data == indices.tensor.data && !problem->indices_are_int64 &&
                        problem->slots_stride_b == problem->indices_stride_b &&
                        problem->slots_stride_s == problem->indices_stride_s;
  if (!in_place) CHIASMA_RETURN_IF_ERROR(check_disjoint(slots, indices));
  for (const NamedTensor& input : {NamedTensor{"block_table", args->block_table}, {"request", args->request}}) {
    if (!is_absent(input.tensor)) CHIASMA_RETURN_IF_ERROR(check_disjoint(slots, input));
  }
  return {};
}

}  // namespace chiasma
