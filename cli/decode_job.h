// One decode call, planned and placed on a device, ready to run.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "chiasma/chiasma.h"
#include "cli/device.h"

namespace chiasma::cli {

inline constexpr std::int64_t kOutputWidth = 512;

// In an output's metadata: whether a sink has taken its part of the probabilities, after which results cannot be
// merged.
inline constexpr const char* kSinkKey = "attn_sink";
inline constexpr const char* kSinkApplied = "applied";

// A tensor of a decode call and the bytes of memory that it spans.
struct DecodeTensor {
  chiasma_tensor chiasma_decode_args::*member;
  std::size_t bytes;
};

struct DecodeJobOptions {
  std::string kernel;  // empty: the best that fits
  bool batch_invariant = false;
  Release release = [](std::span<const std::byte>) {};
};

struct DestroyPlan {
  void operator()(chiasma_decode_plan* plan) const { chiasma_decode_plan_destroy(plan); }
};
using DecodePlanPointer = std::unique_ptr<chiasma_decode_plan, DestroyPlan>;

// The plan of a call whose CPU tensors will be on a device; `args` gets the shapes that it is for. Throws CommandError
// with `where` in front of the library's message.
DecodePlanPointer plan_decode(chiasma_decode_args& args, std::span<const DecodeTensor> inputs,
                              const DeviceTensors& tensors, const DecodeJobOptions& options, const std::string& where);

class DecodeJob {
 public:
  // args: CPU tensors, with out and lse absent; `inputs` says which are there. They and `device` must outlive the job.
  // Throws CommandError with `where` in front of the library's message.
  DecodeJob(const chiasma_decode_args& args, std::span<const DecodeTensor> inputs, harness::Device& device,
            const DecodeJobOptions& options, std::string where);

  void run();
  std::string kernel() const { return chiasma_decode_plan_kernel(plan_.get()); }
  // Results of the last run, on the host, as long as the job lives.
  std::span<const std::byte> out() { return tensors_.fetch(args_.out); }
  std::span<const std::byte> lse() { return tensors_.fetch(args_.lse); }

 private:
  std::string where_;
  DeviceTensors tensors_;
  chiasma_decode_args args_;
  DecodePlanPointer plan_;
  std::byte* workspace_ = nullptr;
};

}  // namespace chiasma::cli
