#include "api/validate.h"

#include <cfloat>
#include <climits>
#include <cmath>

#include "api/validate_parts.h"

namespace chiasma {
namespace {

constexpr int kMaxHeads = 128;

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
  if (!traits_of(problem->format).has_second_cache) {
    return invalid_argument("extra_kv_cache is given with format ", format_name(problem->format),
                            "; only v4, v41 and v41plane have one");
  }
  CHIASMA_RETURN_IF_ERROR(check_cache(cache.name, cache.tensor, problem->format, data, &problem->extra_kv));
  CHIASMA_RETURN_IF_ERROR(check_same_device(cache, q));
  return check_selection({indices, length}, *problem, q, data, &problem->extra_selection);
}

// The rotary columns of the query: a tensor of their own, or the last ones of q.
Status check_query_rope(NamedTensor rope, NamedTensor q, DataCheck data, DecodeProblem* problem) {
  problem->q_is_one_tensor = is_absent(rope.tensor);
  if (!problem->q_is_one_tensor && !traits_of(problem->format).has_rope) {
    return invalid_argument("q_rope is given with format ", format_name(problem->format),
                            ", whose queries have no rotary columns");
  }
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
  CHIASMA_RETURN_IF_ERROR(check_kv_scale(args->kv_scale, problem->format, &problem->kv.scale));
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

}  // namespace chiasma
