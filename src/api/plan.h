// Choosing a kernel and a schedule, from shapes alone.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "api/registry.h"
#include "api/status.h"

namespace chiasma {

struct Choice {
  const Kernel* kernel;
  std::unique_ptr<PlannedDecode> planned;
  std::string text;
};
// Which of `kernels` does the request, and why.
Status select_kernel(std::span<const Kernel> kernels, const PlanRequest& request, const Kernel** chosen,
                     std::string* reason);
// Chooses among the registry for problem on device. options may be null; options->device_info is not looked at here.
Status choose_kernel(const DecodeProblem& problem, const chiasma_device_info& device,
                     const chiasma_plan_options* options, Choice* choice);

}  // namespace chiasma

// The C interface's opaque plan.
struct chiasma_decode_plan {
  chiasma_decode_args args;  // what was planned for; addresses are stale
  chiasma::Choice choice;
};

namespace chiasma {

// What create and run do behind the C interface.
Status create_plan(const chiasma_decode_args* args, const chiasma_plan_options* options,
                   std::unique_ptr<chiasma_decode_plan>* plan);
Status run_plan(const chiasma_decode_plan* plan, const chiasma_decode_args* args, void* workspace,
                std::size_t workspace_bytes, void* stream);
Status check_kernel(const char* name, const chiasma_decode_args* args);

}  // namespace chiasma
