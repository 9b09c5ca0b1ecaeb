#include "cli/decode_job.h"

#include <array>
#include <utility>

#include "cli/error.h"

namespace chiasma::cli {

DecodePlanPointer plan_decode(chiasma_decode_args& args, std::span<const DecodeTensor> inputs,
                              const DeviceTensors& tensors, const DecodeJobOptions& options, const std::string& where) {
  for (const DecodeTensor& tensor : inputs) args.*tensor.member = tensors.shape_of(args.*tensor.member);
  const std::array<std::int64_t, 4> shape{args.q.shape[0], args.q.shape[1], args.q.shape[2], kOutputWidth};
  args.out = chiasma_contiguous(nullptr, CHIASMA_BFLOAT16, args.q.device, 4, shape.data());
  args.lse = chiasma_contiguous(nullptr, CHIASMA_FLOAT32, args.q.device, 3, shape.data());
  chiasma_plan_options plan_options{};
  plan_options.kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  plan_options.batch_invariant = options.batch_invariant ? 1 : 0;
  chiasma_decode_plan* plan = nullptr;
  check_status(chiasma_decode_plan_create(&args, &plan_options, &plan), where);
  return DecodePlanPointer(plan);
}

DecodeJob::DecodeJob(const chiasma_decode_args& args, std::span<const DecodeTensor> inputs, harness::Device& device,
                     const DecodeJobOptions& options, std::string where)
    : where_(std::move(where)), tensors_(device), args_(args) {
  // Planned before anything is allocated, so that the shapes are known to be sound.
  plan_ = plan_decode(args_, inputs, tensors_, options, where_);
  for (const DecodeTensor& tensor : inputs) {
    args_.*tensor.member = tensors_.input(args.*tensor.member, tensor.bytes, options.release);
  }
  const std::int64_t* shape = args_.q.shape;
  args_.out = tensors_.output(CHIASMA_BFLOAT16, {shape[0], shape[1], shape[2], kOutputWidth});
  args_.lse = tensors_.output(CHIASMA_FLOAT32, {shape[0], shape[1], shape[2]});
  workspace_ = tensors_.scratch(chiasma_decode_plan_workspace_bytes(plan_.get()));
}

void DecodeJob::run() {
  check_status(
      chiasma_decode_run(plan_.get(), &args_, workspace_, chiasma_decode_plan_workspace_bytes(plan_.get()), nullptr),
      where_);
}

}  // namespace chiasma::cli
