// The C interface: turns Status into codes and per-thread messages, and keeps exceptions from crossing.
#include <cmath>
#include <exception>
#include <new>
#include <numeric>
#include <string>
#include <type_traits>
#include <vector>

#include "api/devices.h"
#include "api/plan.h"
#include "api/registry.h"
#include "api/status.h"
#include "api/tensor_check.h"
#include "api/validate.h"
#include "chiasma/chiasma.h"
#include "cpu/cache_ops.h"
#include "cpu/oracle.h"
#include "cuda/cache/launch.h"

namespace chiasma {
namespace {

thread_local std::string last_error;

// Keeping the message can itself run out of memory; the code still gets through then.
chiasma_status report(chiasma_status code, const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();
  }
  return code;
}

template <typename Function>
chiasma_status guarded(Function&& function) noexcept {
  try {
    const Status status = function();
    return status.ok() ? CHIASMA_OK : report(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return report(CHIASMA_OUT_OF_MEMORY, "a host memory allocation failed");
  } catch (const std::exception& error) {
    return report(CHIASMA_INTERNAL_ERROR, error.what());
  } catch (...) {
    return report(CHIASMA_INTERNAL_ERROR, "unexpected exception");
  }
}

// Runs a cache operation where its tensors are. WHY type_identity_t: on_cuda is nullptr in a build without CUDA, which
// tells nothing of Problem.
template <typename Problem>
Status run_where(const chiasma_tensor& tensor, const Problem& problem, void* stream, void (*on_cpu)(const Problem&),
                 [[maybe_unused]] std::type_identity_t<Status (*)(const Problem&, const gpu::Place&)> on_cuda) {
  if (tensor.device.kind == CHIASMA_CPU) {
    if (tensor.device.index != 0) return {CHIASMA_DEVICE_UNAVAILABLE, concat("no device cpu:", tensor.device.index)};
    on_cpu(problem);
    return {};
  }
  chiasma_device_info info{};
  CHIASMA_RETURN_IF_ERROR(query_device(tensor.device, &info));
#ifdef CHIASMA_HAS_CUDA
  constexpr int kHopper = 90;
  if (info.cuda_capability != kHopper) {
    return unsupported("this build's kernels need compute capability 9.0; ", device_text(tensor.device), " has ",
                       info.cuda_capability / 10, ".", info.cuda_capability % 10);
  }
  return on_cuda(problem, {tensor.device.index, stream});
#else
  static_cast<void>(stream);
  return {CHIASMA_INTERNAL_ERROR, "a CUDA device in a build without CUDA"};
#endif
}

#ifdef CHIASMA_HAS_CUDA
#define CHIASMA_ON_CUDA(operation) &chiasma::gpu::operation
#else
#define CHIASMA_ON_CUDA(operation) nullptr
#endif

}  // namespace
}  // namespace chiasma

using chiasma::guarded;
using chiasma::Status;

const char* chiasma_version(void) {
  return CHIASMA_VERSION_STRING;
}

const char* chiasma_status_name(chiasma_status status) {
  switch (status) {
    case CHIASMA_OK: return "ok";
    case CHIASMA_INVALID_ARGUMENT: return "invalid argument";
    case CHIASMA_UNSUPPORTED: return "unsupported";
    case CHIASMA_DEVICE_UNAVAILABLE: return "device unavailable";
    case CHIASMA_OUT_OF_MEMORY: return "out of memory";
    case CHIASMA_DEVICE_ERROR: return "device error";
    case CHIASMA_INTERNAL_ERROR: return "internal error";
  }
  return "unknown status";
}

const char* chiasma_last_error(void) {
  return chiasma::last_error.c_str();
}

chiasma_tensor chiasma_contiguous(void* data, chiasma_dtype dtype, chiasma_device device, int32_t rank,
                                  const int64_t* shape) {
  chiasma_tensor tensor{};
  if (rank < 1 || rank > CHIASMA_MAX_RANK || shape == nullptr) return tensor;
  tensor.data = data;
  tensor.rank = rank;
  tensor.dtype = dtype;
  tensor.device = device;
  int64_t stride = 1;
  for (int32_t dim = rank - 1; dim >= 0; --dim) {
    tensor.shape[dim] = shape[dim];
    tensor.stride[dim] = stride;
    // A product that overflows is left at an impossible value, which validation then names.
    if (__builtin_mul_overflow(stride, shape[dim], &stride)) stride = -1;
  }
  return tensor;
}

int64_t chiasma_kv_page_bytes(chiasma_kv_format format, int64_t page) {
  if (!chiasma::is_known_format(format) || page < 1 || page > INT32_MAX) return 0;
  return chiasma::padded_page_bytes(static_cast<chiasma::KvFormat>(format), static_cast<int>(page));
}

int32_t chiasma_kv_dim(chiasma_kv_format format) {
  return chiasma::is_known_format(format) ? chiasma::key_dim(static_cast<chiasma::KvFormat>(format)) : 0;
}

int64_t chiasma_kv_width(chiasma_kv_format format) {
  return chiasma::is_known_format(format) ? chiasma::token_extent(static_cast<chiasma::KvFormat>(format)) : 0;
}

const char* chiasma_kv_format_name(chiasma_kv_format format) {
  return chiasma::format_name(static_cast<chiasma::KvFormat>(format));
}

double chiasma_default_sm_scale(chiasma_kv_format format) {
  if (!chiasma::is_known_format(format)) return 0;
  return 1 / std::sqrt(static_cast<double>(chiasma::key_dim(static_cast<chiasma::KvFormat>(format))));
}

chiasma_status chiasma_decode_plan_create(const chiasma_decode_args* args, const chiasma_plan_options* options,
                                          chiasma_decode_plan** plan) {
  if (plan == nullptr) return chiasma::report(CHIASMA_INVALID_ARGUMENT, "plan is NULL; it receives the result");
  *plan = nullptr;
  return guarded([&] {
    std::unique_ptr<chiasma_decode_plan> made;
    CHIASMA_RETURN_IF_ERROR(chiasma::create_plan(args, options, &made));
    *plan = made.release();
    return Status{};
  });
}

void chiasma_decode_plan_destroy(chiasma_decode_plan* plan) {
  delete plan;
}

size_t chiasma_decode_plan_workspace_bytes(const chiasma_decode_plan* plan) {
  return plan == nullptr ? 0 : plan->choice.planned->workspace_bytes();
}

const char* chiasma_decode_plan_kernel(const chiasma_decode_plan* plan) {
  return plan == nullptr ? "" : plan->choice.kernel->info.name;
}

const char* chiasma_decode_plan_text(const chiasma_decode_plan* plan) {
  return plan == nullptr ? "" : plan->choice.text.c_str();
}

chiasma_status chiasma_decode_run(const chiasma_decode_plan* plan, const chiasma_decode_args* args, void* workspace,
                                  size_t workspace_bytes, void* stream) {
  return guarded([&] { return chiasma::run_plan(plan, args, workspace, workspace_bytes, stream); });
}

chiasma_status chiasma_decode_oracle(const chiasma_decode_args* args, const int64_t* rows, int64_t num_rows,
                                     double* out, double* lse, double* value_rms, double* term_rms) {
  return guarded([&]() -> Status {
    chiasma::DecodeProblem problem;
    CHIASMA_RETURN_IF_ERROR(chiasma::validate_oracle(args, &problem));
    if (num_rows < 0 || (rows == nullptr && num_rows != problem.num_rows())) {
      return chiasma::invalid_argument("num_rows is ", num_rows,
                                       "; without rows it must be b * s_q = ", problem.num_rows());
    }
    if (num_rows > 0 && (out == nullptr || lse == nullptr)) {
      return chiasma::invalid_argument(out == nullptr ? "out" : "lse", " is NULL");
    }
    for (int64_t n = 0; rows != nullptr && n < num_rows; ++n) {
      if (rows[n] < 0 || rows[n] >= problem.num_rows()) {
        return chiasma::invalid_argument("rows[", n, "] is ", rows[n], "; allowed are 0 to ", problem.num_rows() - 1);
      }
    }
    std::vector<int64_t> all_rows(rows == nullptr ? static_cast<size_t>(num_rows) : 0);
    std::iota(all_rows.begin(), all_rows.end(), int64_t{0});
    chiasma::cpu::decode_oracle(problem, rows == nullptr ? all_rows.data() : rows, num_rows, out, lse, value_rms,
                                term_rms);
    return {};
  });
}

chiasma_status chiasma_merge(const chiasma_merge_args* args, void* stream) {
  return guarded([&]() -> Status {
    chiasma::MergeProblem problem;
    CHIASMA_RETURN_IF_ERROR(chiasma::validate_merge(args, &problem));
    return chiasma::run_where(args->part_out, problem, stream, chiasma::cpu::merge, CHIASMA_ON_CUDA(merge));
  });
}

chiasma_status chiasma_quantize(const chiasma_quantize_args* args, void* stream) {
  return guarded([&]() -> Status {
    chiasma::QuantizeProblem problem;
    CHIASMA_RETURN_IF_ERROR(chiasma::validate_quantize(args, &problem));
    return chiasma::run_where(args->kv, problem, stream, chiasma::cpu::quantize, CHIASMA_ON_CUDA(quantize));
  });
}

chiasma_status chiasma_dequantize(const chiasma_dequantize_args* args, void* stream) {
  return guarded([&]() -> Status {
    chiasma::DequantizeProblem problem;
    CHIASMA_RETURN_IF_ERROR(chiasma::validate_dequantize(args, &problem));
    return chiasma::run_where(args->kv, problem, stream, chiasma::cpu::dequantize, CHIASMA_ON_CUDA(dequantize));
  });
}

chiasma_status chiasma_gather_dequantize(const chiasma_gather_args* args, void* stream) {
  return guarded([&]() -> Status {
    chiasma::GatherProblem problem;
    CHIASMA_RETURN_IF_ERROR(chiasma::validate_gather(args, &problem));
    return chiasma::run_where(args->kv, problem, stream, chiasma::cpu::gather_dequantize,
                              CHIASMA_ON_CUDA(gather_dequantize));
  });
}

chiasma_status chiasma_translate_indices(const chiasma_translate_args* args, void* stream) {
  return guarded([&]() -> Status {
    chiasma::TranslateProblem problem;
    CHIASMA_RETURN_IF_ERROR(chiasma::validate_translate(args, &problem));
    return chiasma::run_where(args->indices, problem, stream, chiasma::cpu::translate_indices,
                              CHIASMA_ON_CUDA(translate_indices));
  });
}

int32_t chiasma_device_count(void) {
  return chiasma::device_count();
}

chiasma_status chiasma_device_query(int32_t number, chiasma_device_info* info) {
  return guarded([&] { return chiasma::query_device(number, info); });
}

chiasma_status chiasma_cuda_available(void) {
  return guarded([] { return chiasma::cuda_available(); });
}

int32_t chiasma_kernel_count(void) {
  return static_cast<int32_t>(chiasma::registered_kernels().size());
}

chiasma_status chiasma_kernel_query(int32_t number, chiasma_kernel_info* info) {
  return guarded([&]() -> Status {
    if (info == nullptr) return chiasma::invalid_argument("info is NULL");
    if (number < 0 || number >= chiasma_kernel_count()) {
      return chiasma::invalid_argument("kernel number is ", number, "; allowed are 0 to ", chiasma_kernel_count() - 1);
    }
    *info = chiasma::registered_kernels()[static_cast<size_t>(number)].info;
    return {};
  });
}

chiasma_status chiasma_kernel_check(const char* kernel, const chiasma_decode_args* args) {
  return guarded([&] { return chiasma::check_kernel(kernel, args); });
}
