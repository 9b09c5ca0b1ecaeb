#include "api/registry.h"

#include <array>
#include <string_view>

#include "cpu/decode.h"
#ifdef CHIASMA_HAS_CUDA
#include "cuda/sm90_sparse_bf16/launch.h"
#include "cuda/sm90_sparse_fp8/launch.h"
#include "cuda/sm90_sparse_fp8_direct/launch.h"
#include "cuda/split_plan.h"
#endif

namespace chiasma {
namespace {

class CpuPlan final : public PlannedDecode {
 public:
  explicit CpuPlan(const cpu::DecodeSchedule& schedule) : schedule_(schedule) {}

  std::size_t workspace_bytes() const override { return schedule_.workspace_bytes; }

  std::string describe() const override {
    return concat("splits per row: ", schedule_.num_splits, " of up to ", schedule_.tokens_per_split,
                  " entries (a function of topk alone, so that results depend on neither batch nor threads)\n",
                  "threads: ", schedule_.num_threads, ", ",
                  schedule_.rows_per_wave == 0 ? std::string("each takes whole rows")
                                               : concat("sharing ", schedule_.rows_per_wave, " rows at once"),
                  ", instruction set: ", cpu::simd_target());
  }

  Status run(const DecodeProblem& problem, void* workspace, void* /*stream*/) const override {
    cpu::run_decode(problem, schedule_, workspace);
    return {};
  }

 private:
  cpu::DecodeSchedule schedule_;
};

Status check_cpu(const PlanRequest& /*request*/) {
  return {};
}

std::unique_ptr<PlannedDecode> plan_cpu(const PlanRequest& request) {
  return std::make_unique<CpuPlan>(cpu::schedule_decode(request.problem, request.num_splits, request.num_threads));
}

const std::array kKernels = {
    Kernel{{"cpu_simd", CHIASMA_CPU, "SIMD decode on the CPU in float32, exact scales",
            "caches of every format; 1..128 heads; every option; batch invariant by construction"},
           check_cpu,
           nullptr,
           plan_cpu},
#ifdef CHIASMA_HAS_CUDA
    Kernel{
        {"sm90_sparse_fp8_direct", CHIASMA_CUDA,
         "Hopper, f16 tensor cores; rows stay raw in shared memory and are dequantised into operand registers",
         "caches of every format; 1..128 heads (padded to 8, 16, 32, 64 or 128); every option; compute capability 9.0"},
        sm90_sparse_fp8_direct::check,
        nullptr,
        sm90_sparse_fp8_direct::plan,
        sm90_sparse_fp8_direct::estimate_us},
    Kernel{
        {"sm90_sparse_bf16", CHIASMA_CUDA, "Hopper, bf16 tensor cores; rows are operands as they lie in shared memory",
         "bf16 and bf16nope caches; 1..128 heads (padded to 64 or 128); every option; compute capability 9.0"},
        sm90_sparse_bf16::check,
        nullptr,
        sm90_sparse_bf16::plan,
        sm90_sparse_bf16::estimate_us},
    Kernel{{"sm90_sparse_fp8_crossover", CHIASMA_CUDA,
            "Hopper, f16 tensor cores; the two thread blocks of a cluster dequantise half of the rows each and "
            "exchange them",
            "v32 caches; 1..128 heads (padded to 128); one length a request, no q_rope; compute capability 9.0"},
           sm90_sparse_fp8::check,
           sm90_sparse_fp8::suits_crossover,
           sm90_sparse_fp8::plan_crossover},
    Kernel{{"sm90_sparse_fp8_baseline", CHIASMA_CUDA,
            "the same without clusters: every thread block dequantises all rows itself",
            "v32 caches; 1..128 heads (padded to a multiple of 64); one length a request, no q_rope; compute "
            "capability 9.0"},
           sm90_sparse_fp8::check,
           nullptr,
           sm90_sparse_fp8::plan_baseline},
#endif
};

}  // namespace

std::span<const Kernel> registered_kernels() {
  return kKernels;
}

const Kernel* find_kernel(const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::string_view(kernel.info.name) == name) return &kernel;
  }
  return nullptr;
}

std::string kernel_names(chiasma_device_kind kind) {
  std::string names;
  for (const Kernel& kernel : kKernels) {
    if (kernel.info.device_kind == kind) names += concat(names.empty() ? "" : ", ", kernel.info.name);
  }
  return names.empty() ? "none" : names;
}

}  // namespace chiasma
