// decode and plan.
#include <tvm/ffi/container/array.h>

#include <array>
#include <optional>

#include "allocation.h"
#include "arguments.h"
#include "boundary.h"
#include "plan_cache.h"

namespace chiasma::python {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Tensor;

constexpr std::int64_t kValueDim = 512;

// The arguments in Python's order; those of plan() are the same up to batch_invariant.
enum Position : std::size_t {
  kQ,
  kQRope,
  kKvCache,
  kIndices,
  kTopkLength,
  kAttnSink,
  kExtraKvCache,
  kExtraIndices,
  kExtraTopkLength,
  kOut,
  kLse,
  kFormat,
  kKvScale,
  kSmScale,
  kKernel,
  kBatchInvariant,
  kDecodeOnly,
  kWorkspace = kDecodeOnly,
  kStream,
  kDecodeChecked,
  kDecodeCount,
  kNumSplits = kDecodeOnly,
  kNumThreads,
  kPlanChecked,
  kPlanCount,
};
constexpr std::array<const char*, kDecodeOnly> kNames = {"q",
                                                         "q_pe",
                                                         "kv_cache",
                                                         "indices",
                                                         "topk_length",
                                                         "attn_sink",
                                                         "extra_kv_cache",
                                                         "extra_indices",
                                                         "extra_topk_length",
                                                         "out",
                                                         "lse",
                                                         "format",
                                                         "kv_scale",
                                                         "sm_scale",
                                                         "kernel",
                                                         "batch_invariant"};

// One call: the C interface's arguments, and what has to live until it is over.
class DecodeCall {
 public:
  explicit DecodeCall(Arguments arguments) : arguments_(arguments) {
    // Rank 3 has no s_q: every tensor of the call then has one dimension less.
    is_reduced_ = as_dltensor(at(kQ))->ndim == 3;
    args_.format = as_format(at(kFormat), at(kKvCache));
    args_.kv_scale = as_kv_scale(at(kKvScale));
    args_.sm_scale = is_none(at(kSmScale)) ? chiasma_default_sm_scale(args_.format) : as_double(at(kSmScale));
    args_.q = token_tensor(kQ, kBfloat16, 4);
    args_.q_rope = token_tensor(kQRope, kBfloat16, 4);
    args_.kv_cache = as_cache(at(kKvCache), args_.format);
    args_.indices = token_tensor(kIndices, kInt32 | kInt64, 3);
    args_.topk_length = as_tensor(at(kTopkLength), kInt32);
    args_.attn_sink = as_tensor(at(kAttnSink), kFloat32);
    if (!is_none(at(kExtraKvCache))) args_.extra_kv_cache = as_cache(at(kExtraKvCache), args_.format);
    args_.extra_indices = token_tensor(kExtraIndices, kInt32 | kInt64, 3);
    args_.extra_topk_length = as_tensor(at(kExtraTopkLength), kInt32);
    args_.out = token_tensor(kOut, kBfloat16, 4);
    args_.lse = token_tensor(kLse, kFloat32, 3);
    options_.kernel = as_text(at(kKernel));
    options_.batch_invariant = as_bool(at(kBatchInvariant)) ? 1 : 0;
  }

  Argument at(Position position) const { return {kNames[position], &arguments_[position]}; }
  const chiasma_decode_args& args() const { return args_; }
  chiasma_device device() const { return args_.q.device; }
  chiasma_plan_options& options() { return options_; }

  // Planning looks at no address: outputs that are not there yet, and indices that would be narrowed, only need a
  // shape.
  void describe_missing() {
    for (chiasma_tensor* indices : {&args_.indices, &args_.extra_indices}) {
      if (indices->rank == 3 && indices->dtype == CHIASMA_INT64) {
        *indices = chiasma_contiguous(nullptr, CHIASMA_INT32, indices->device, 3, indices->shape);
      }
    }
    if (args_.out.rank == 0) args_.out = output(nullptr, CHIASMA_BFLOAT16, 4);
    if (args_.lse.rank == 0) args_.lse = output(nullptr, CHIASMA_FLOAT32, 3);
  }

  void narrow_indices(void* stream) {
    narrow(&args_.indices, stream);
    narrow(&args_.extra_indices, stream);
  }

 private:
  // A tensor whose dimensions are those of the query tokens, of `rank` where s_q is one of them.
  chiasma_tensor token_tensor(Position position, unsigned accepts, int rank) const {
    if (is_none(at(position))) return {};
    if (!is_reduced_) return as_tensor(at(position), accepts);
    const DLTensor& given = *as_dltensor(at(position));
    if (given.ndim != rank - 1) {
      fail(FailureKind::value, kNames[position], " has shape ", shape_text(given), ", rank ", given.ndim,
           "; with a q of rank 3, [T, h_q, d_qk], it must have rank ", rank - 1);
    }
    return as_tensor(at(position), accepts, 1);
  }

  chiasma_tensor output(void* data, chiasma_dtype dtype, int rank) const {
    if (args_.q.rank != 4) return {};
    const std::int64_t shape[] = {args_.q.shape[0], args_.q.shape[1], args_.q.shape[2], kValueDim};
    return chiasma_contiguous(data, dtype, device(), rank, shape);
  }

  void narrow(chiasma_tensor* indices, void* stream) {
    if (indices->rank != 3 || indices->dtype != CHIASMA_INT64) return;
    const std::int64_t* shape = indices->shape;
    const Tensor scratch = allocate({shape[0], shape[1], shape[2]}, CHIASMA_INT32, indices->device);
    scratch_[num_scratch_++] = scratch;
    chiasma_translate_args translate{};
    translate.indices = *indices;
    translate.slots = chiasma_contiguous(scratch.data_ptr(), CHIASMA_INT32, indices->device, 3, shape);
    check(chiasma_translate_indices(&translate, stream));
    *indices = translate.slots;
  }

  Arguments arguments_;
  bool is_reduced_ = false;
  chiasma_decode_args args_{};
  chiasma_plan_options options_{};
  std::array<std::optional<Tensor>, 2> scratch_;
  std::size_t num_scratch_ = 0;
};

// A workspace of the caller's, whose size and address the library then judges.
chiasma_tensor callers_workspace(Argument argument, chiasma_device device) {
  const chiasma_tensor workspace = as_tensor(argument, kBytes);
  if (workspace.rank != 1 || (workspace.shape[0] > 1 && workspace.stride[0] != 1)) {
    fail(FailureKind::value, "workspace has shape ", shape_text(*as_dltensor(argument)),
         "; it must have one dimension and be contiguous");
  }
  if (workspace.device.kind != device.kind || workspace.device.index != device.index) {
    fail(FailureKind::value, "workspace is on another device than q; it must be on q's");
  }
  return workspace;
}

// [kernel, workspace_bytes, text]
Result plan(Arguments arguments) {
  DecodeCall call(arguments);
  const auto number = [&](Position position, const char* name) {
    const std::int64_t value = as_int({name, &arguments[position]});
    if (value < INT32_MIN || value > INT32_MAX) fail(FailureKind::value, name, " is ", value, ", beyond 32 bits");
    return static_cast<std::int32_t>(value);
  };
  call.options().num_splits = number(kNumSplits, "num_splits");
  call.options().num_threads = number(kNumThreads, "num_threads");
  call.describe_missing();
  const PlanPointer made = find_plan(call.args(), call.options());
  return Array<Any>{tvm::ffi::String(chiasma_decode_plan_kernel(made.get())),
                    static_cast<std::int64_t>(chiasma_decode_plan_workspace_bytes(made.get())),
                    tvm::ffi::String(chiasma_decode_plan_text(made.get()))};
}

}  // namespace

Result decode(Arguments arguments) {
  DecodeCall call(arguments);
  void* const stream = as_stream({"stream", &arguments[kStream]}, call.device());
  call.narrow_indices(stream);
  const PlanPointer plan = find_plan(call.args(), call.options());
  const std::size_t needed = chiasma_decode_plan_workspace_bytes(plan.get());
  const Argument given{"workspace", &arguments[kWorkspace]};
  if (is_none(given)) {
    const Workspace workspace(needed, call.device());
    check(chiasma_decode_run(plan.get(), &call.args(), workspace.data(), needed, stream));
  } else {
    const chiasma_tensor workspace = callers_workspace(given, call.device());
    const auto bytes = static_cast<std::size_t>(workspace.shape[0]);
    check(chiasma_decode_run(plan.get(), &call.args(), workspace.data, bytes, stream));
  }
  return nullptr;
}

CHIASMA_PYTHON_EXPORT(decode, decode, kDecodeCount)
CHIASMA_PYTHON_EXPORT(plan, plan, kPlanCount)

}  // namespace chiasma::python
