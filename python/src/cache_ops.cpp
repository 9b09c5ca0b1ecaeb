// Quantising, dequantising, gathering and translating. The caller passes every output.
#include "arguments.h"
#include "boundary.h"

namespace chiasma::python {
namespace {

chiasma_kv_format format_of(Arguments arguments, std::size_t position, std::size_t cache) {
  return as_format({"format", &arguments[position]}, {"kv_cache", &arguments[cache]});
}

// kv, rope, slot_mapping, kv_cache, nonfinite_count, skipped_count, format, kv_scale, scale, stream, checked
Result quantize(Arguments arguments) {
  chiasma_quantize_args args{};
  args.format = format_of(arguments, 6, 3);
  args.scale = static_cast<chiasma_scale_mode>(as_int({"scale", &arguments[8]}));
  args.kv_scale = as_kv_scale({"kv_scale", &arguments[7]});
  args.rope = as_tensor({"k_pe", &arguments[1]}, kBfloat16);
  args.kv = as_tensor({args.rope.rank > 0 ? "kv_c" : "kv", &arguments[0]}, kBfloat16);
  args.slot_mapping = as_tensor({"slot_mapping", &arguments[2]}, kInt64);
  args.kv_cache = as_cache({"kv_cache", &arguments[3]}, args.format);
  args.nonfinite_count = as_tensor({"nonfinite_count", &arguments[4]}, kInt64);
  args.skipped_count = as_tensor({"skipped_count", &arguments[5]}, kInt64);
  check(chiasma_quantize(&args, as_stream({"stream", &arguments[9]}, args.kv.device)));
  return nullptr;
}

// kv_cache, kv, format, kv_scale, stream, checked
Result dequantize(Arguments arguments) {
  chiasma_dequantize_args args{};
  args.format = format_of(arguments, 2, 0);
  args.kv_scale = as_kv_scale({"kv_scale", &arguments[3]});
  args.kv_cache = as_cache({"kv_cache", &arguments[0]}, args.format);
  args.kv = as_tensor({"out", &arguments[1]}, kFloat32 | kBfloat16);
  check(chiasma_dequantize(&args, as_stream({"stream", &arguments[4]}, args.kv_cache.device)));
  return nullptr;
}

// kv_cache, slots, block_table, seq_lens, starts, kv, format, kv_scale, stream, checked
Result gather_dequantize(Arguments arguments) {
  chiasma_gather_args args{};
  args.format = format_of(arguments, 6, 0);
  args.kv_scale = as_kv_scale({"kv_scale", &arguments[7]});
  args.kv_cache = as_cache({"kv_cache", &arguments[0]}, args.format);
  args.slots = as_tensor({"slots", &arguments[1]}, kInt32 | kInt64);
  args.block_table = as_tensor({"block_table", &arguments[2]}, kInt32);
  args.seq_lens = as_tensor({"seq_lens", &arguments[3]}, kInt32);
  args.starts = as_tensor({"starts", &arguments[4]}, kInt32 | kInt64);
  args.kv = as_tensor({"out", &arguments[5]}, kFloat32 | kBfloat16);
  check(chiasma_gather_dequantize(&args, as_stream({"stream", &arguments[8]}, args.kv_cache.device)));
  return nullptr;
}

std::int32_t as_int32(const char* name, const TVMFFIAny& value) {
  const std::int64_t number = as_int({name, &value});
  if (number < INT32_MIN || number > INT32_MAX) fail(FailureKind::value, name, " is ", number, ", beyond 32 bits");
  return static_cast<std::int32_t>(number);
}

// indices, block_table, request, slots, page, cp_world, cp_rank, cp_interleave, stream, checked. Indices of rank 2 have
// no s_q.
Result translate_indices(Arguments arguments) {
  const Argument indices{"indices", &arguments[0]};
  const int unit_dim = as_dltensor(indices)->ndim == 2 ? 1 : -1;
  chiasma_translate_args args{};
  args.indices = as_tensor(indices, kInt32 | kInt64, unit_dim);
  args.block_table = as_tensor({"block_table", &arguments[1]}, kInt32);
  args.request = as_tensor({"request", &arguments[2]}, kInt32);
  const Argument slots{"out", &arguments[3]};
  if (unit_dim == 1 && as_dltensor(slots)->ndim != 2) {
    fail(FailureKind::value, "out has shape ", shape_text(*as_dltensor(slots)), "; it must have that of indices");
  }
  args.slots = as_tensor(slots, kInt32, unit_dim);
  args.page = as_int({"page", &arguments[4]});
  args.cp_world = as_int32("cp_world", arguments[5]);
  args.cp_rank = as_int32("cp_rank", arguments[6]);
  args.cp_interleave = as_int32("cp_interleave", arguments[7]);
  check(chiasma_translate_indices(&args, as_stream({"stream", &arguments[8]}, args.indices.device)));
  return nullptr;
}

}  // namespace

CHIASMA_PYTHON_EXPORT(quantize, quantize, 11)
CHIASMA_PYTHON_EXPORT(dequantize, dequantize, 6)
CHIASMA_PYTHON_EXPORT(gather_dequantize, gather_dequantize, 10)
CHIASMA_PYTHON_EXPORT(translate_indices, translate_indices, 10)

}  // namespace chiasma::python
