#include "api/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "api/devices.h"
#include "api/tensor_check.h"
#include "api/validate.h"

namespace chiasma {
namespace {

constexpr const char* kKernelVariable = "CHIASMA_KERNEL";

PlanRequest make_request(const DecodeProblem& problem, const chiasma_device_info& device,
                         const chiasma_plan_options* options) {
  if (options == nullptr) return {problem, device, false, 0, 0};
  return {problem, device, options->batch_invariant != 0, options->num_splits, options->num_threads};
}

Status check_options(const chiasma_plan_options* options) {
  if (options == nullptr) return {};
  if (options->num_splits < 0) {
    return invalid_argument("num_splits is ", options->num_splits, "; it must be >= 0 (0 = automatic)");
  }
  if (options->num_threads < 0) {
    return invalid_argument("num_threads is ", options->num_threads, "; it must be >= 0 (0 = automatic)");
  }
  return {};
}

// The kernel asked for by name and how it was asked for; null name: none.
struct WantedKernel {
  const char* name;
  const char* source;
};

WantedKernel wanted_kernel(const chiasma_plan_options* options) {
  if (options != nullptr && options->kernel != nullptr) return {options->kernel, "options.kernel"};
  const char* from_environment = std::getenv(kKernelVariable);
  if (from_environment != nullptr && *from_environment != '\0') return {from_environment, kKernelVariable};
  return {nullptr, nullptr};
}

// A kernel's own verdict, after the one thing that is the same for all: it runs on one kind of device.
Status check_request(const Kernel& kernel, const PlanRequest& request) {
  if (kernel.info.device_kind != request.device.device.kind) {
    return unsupported("it runs on ", kernel.info.device_kind == CHIASMA_CPU ? "cpu" : "cuda",
                       " tensors, these are on ", device_text(request.device.device));
  }
  return kernel.check(request);
}

Status find_wanted(const WantedKernel& wanted, chiasma_device_kind kind, const Kernel** kernel) {
  *kernel = find_kernel(wanted.name);
  if (*kernel != nullptr) return {};
  return unsupported(wanted.source, " names kernel '", wanted.name,
                     "', which this build does not have; its kernels for ", kind == CHIASMA_CPU ? "cpu" : "cuda", ": ",
                     kernel_names(kind));
}

Status select(const PlanRequest& request, const WantedKernel& wanted, const Kernel** chosen, std::string* reason) {
  if (wanted.name == nullptr) return select_kernel(registered_kernels(), request, chosen, reason);
  CHIASMA_RETURN_IF_ERROR(find_wanted(wanted, request.device.device.kind, chosen));
  const Status verdict = check_request(**chosen, request);
  if (!verdict.ok()) return {verdict.code(), concat("kernel '", wanted.name, "': ", verdict.message())};
  *reason = concat("asked for by ", wanted.source);
  return {};
}

// NaN where nobody has estimated, or where the batch must not decide.
double estimate_of(const Kernel& kernel, const PlanRequest& request) {
  if (kernel.estimate_us == nullptr || request.batch_invariant || request.num_splits > 0) return std::nan("");
  return kernel.estimate_us(request);
}

std::string estimate_text(double us) {
  return std::isnan(us) ? std::string("first choice for this problem")
                        : concat("estimated at ", std::round(us * 10) / 10, " us");
}

std::string problem_text(const DecodeProblem& problem) {
  std::string text = concat("format ", format_name(problem.format), ", b ", problem.b, ", s_q ", problem.s_q, ", h_q ",
                            problem.h_q, ", topk ", problem.selection.topk);
  if (problem.extra_kv.page_size > 0) text += concat(" + ", problem.extra_selection.topk);
  return text + concat(", page ", problem.kv.page_size, ", slots ", problem.kv.num_slots());
}

// The tensors of a call with their names, so that plan and run compare them one by one.
struct ArgumentField {
  const char* name;
  chiasma_tensor chiasma_decode_args::*tensor;
};
constexpr ArgumentField kFields[] = {
    {"q", &chiasma_decode_args::q},
    {"q_rope", &chiasma_decode_args::q_rope},
    {"kv_cache", &chiasma_decode_args::kv_cache},
    {"indices", &chiasma_decode_args::indices},
    {"topk_length", &chiasma_decode_args::topk_length},
    {"attn_sink", &chiasma_decode_args::attn_sink},
    {"extra_kv_cache", &chiasma_decode_args::extra_kv_cache},
    {"extra_indices", &chiasma_decode_args::extra_indices},
    {"extra_topk_length", &chiasma_decode_args::extra_topk_length},
    {"out", &chiasma_decode_args::out},
    {"lse", &chiasma_decode_args::lse},
};

Status check_matches_plan(const chiasma_decode_args& planned, const chiasma_decode_args& given) {
  if (planned.format != given.format) {
    return invalid_argument("format is ", format_name(static_cast<KvFormat>(given.format)), "; the plan was made for ",
                            format_name(static_cast<KvFormat>(planned.format)));
  }
  for (const ArgumentField& field : kFields) {
    const chiasma_tensor& a = planned.*field.tensor;
    const chiasma_tensor& b = given.*field.tensor;
    const bool same_shape = a.rank == b.rank && std::equal(a.shape, a.shape + a.rank, b.shape);
    if (!same_shape) {
      return invalid_argument(field.name, " has shape ", shape_text(b), "; the plan was made for ", shape_text(a),
                              " (an absent tensor has none)");
    }
    const bool same_device = a.device.kind == b.device.kind && a.device.index == b.device.index;
    if (a.rank > 0 && !same_device) {
      return invalid_argument(field.name, " is on ", device_text(b.device), "; the plan was made for ",
                              device_text(a.device));
    }
  }
  return {};
}

}  // namespace

Status select_kernel(std::span<const Kernel> kernels, const PlanRequest& request, const Kernel** chosen,
                     std::string* reason) {
  std::string others;
  const Kernel* best = nullptr;
  const Kernel* fallback = nullptr;
  double best_us = 0;
  const auto pass_over = [&](const Kernel& kernel, const std::string& why) {
    others += concat("\n  ", kernel.info.name, ": ", why);
  };
  for (const Kernel& kernel : kernels) {
    if (kernel.info.device_kind != request.device.device.kind) continue;
    const Status verdict = check_request(kernel, request);
    if (!verdict.ok() || (kernel.suits != nullptr && !kernel.suits(request))) {
      if (best == nullptr) pass_over(kernel, verdict.ok() ? "another is faster here" : verdict.message());
      if (verdict.ok() && fallback == nullptr) fallback = &kernel;
      continue;
    }
    // Comparisons with NaN are false: without estimates the order of preference decides.
    const double us = estimate_of(kernel, request);
    if (best != nullptr && us >= best_us) pass_over(kernel, estimate_text(us));
    if (best != nullptr && us < best_us) pass_over(*best, estimate_text(best_us));
    if (best == nullptr || us < best_us) {
      best = &kernel;
      best_us = us;
    }
  }
  *chosen = best != nullptr ? best : fallback;
  if (*chosen == nullptr) {
    return unsupported("no kernel for this problem on ", device_text(request.device.device),
                       others.empty() ? "; this build has none for that kind of device" : ":", others);
  }
  *reason = best == nullptr ? std::string("no other kernel can do it")
                            : concat(estimate_text(best_us), others.empty() ? "" : "; passed over:", others);
  return {};
}

Status choose_kernel(const DecodeProblem& problem, const chiasma_device_info& device,
                     const chiasma_plan_options* options, Choice* choice) {
  CHIASMA_RETURN_IF_ERROR(check_options(options));
  const PlanRequest request = make_request(problem, device, options);
  std::string reason;
  CHIASMA_RETURN_IF_ERROR(select(request, wanted_kernel(options), &choice->kernel, &reason));
  choice->planned = choice->kernel->plan(request);
  choice->text =
      concat("problem: ", problem_text(problem), "\ndevice: ", device_text(device.device), " (", device.name, ", ",
             device.compute_units, " compute units)\nkernel: ", choice->kernel->info.name, ", ", reason, "\n",
             choice->planned->describe(), "\nworkspace: ", choice->planned->workspace_bytes(), " bytes\n");
  return {};
}

Status create_plan(const chiasma_decode_args* args, const chiasma_plan_options* options,
                   std::unique_ptr<chiasma_decode_plan>* plan) {
  DecodeProblem problem;
  CHIASMA_RETURN_IF_ERROR(validate_decode(args, DataCheck::shapes_only, &problem));
  chiasma_device_info device{};
  if (options != nullptr && options->device_info != nullptr) {
    device = *options->device_info;
    device.device = args->q.device;
  } else {
    CHIASMA_RETURN_IF_ERROR(query_device(args->q.device, &device));
  }
  auto made = std::make_unique<chiasma_decode_plan>();
  made->args = *args;
  CHIASMA_RETURN_IF_ERROR(choose_kernel(problem, device, options, &made->choice));
  *plan = std::move(made);
  return {};
}

Status run_plan(const chiasma_decode_plan* plan, const chiasma_decode_args* args, void* workspace,
                std::size_t workspace_bytes, void* stream) {
  if (plan == nullptr) return invalid_argument("plan is NULL");
  DecodeProblem problem;
  CHIASMA_RETURN_IF_ERROR(validate_decode(args, DataCheck::with_data, &problem));
  CHIASMA_RETURN_IF_ERROR(check_matches_plan(plan->args, *args));
  const std::size_t needed = plan->choice.planned->workspace_bytes();
  if (workspace_bytes < needed) {
    return invalid_argument("workspace_bytes is ", workspace_bytes, "; the plan needs ", needed);
  }
  if (needed > 0 && workspace == nullptr) {
    return invalid_argument("workspace is NULL; the plan needs ", needed, " bytes");
  }
  if (needed > 0 && reinterpret_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
    return invalid_argument("workspace is at address ", workspace, ", which is not a multiple of ",
                            kWorkspaceAlignment);
  }
  return plan->choice.planned->run(problem, workspace, stream);
}

Status check_kernel(const char* name, const chiasma_decode_args* args) {
  if (name == nullptr) return invalid_argument("kernel is NULL; it must be a name that chiasma_kernel_query lists");
  DecodeProblem problem;
  CHIASMA_RETURN_IF_ERROR(validate_decode(args, DataCheck::shapes_only, &problem));
  const Kernel* kernel = nullptr;
  CHIASMA_RETURN_IF_ERROR(find_wanted({name, "kernel"}, args->q.device.kind, &kernel));
  chiasma_device_info device{};
  CHIASMA_RETURN_IF_ERROR(query_device(args->q.device, &device));
  return check_request(*kernel, make_request(problem, device, nullptr));
}

}  // namespace chiasma
