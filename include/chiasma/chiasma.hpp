// Chiasma for C++20: values that clean up after themselves, and exceptions instead of status codes. A thin, header-only
// layer over chiasma.h, which documents shapes, units and rules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "chiasma/chiasma.h"

namespace chiasma {

// Thrown where the C function would have returned `status()`; what() is chiasma_last_error().
class Error : public std::runtime_error {
 public:
  Error(chiasma_status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  chiasma_status status() const noexcept { return status_; }

 private:
  chiasma_status status_;
};

inline void check(chiasma_status status) {
  if (status != CHIASMA_OK) throw Error(status, chiasma_last_error());
}

inline constexpr chiasma_device kCpu{CHIASMA_CPU, 0};
constexpr chiasma_device cuda_device(std::int32_t index = 0) {
  return {CHIASMA_CUDA, index};
}

// bf16 as stored, for spans whose element type decides the dtype. Any 16-bit type of your own can be viewed through
// tensor(pointer, dtype, ...) instead.
enum class Bfloat16 : std::uint16_t {};

template <typename T>
inline constexpr chiasma_dtype kDtypeOf = static_cast<chiasma_dtype>(0);
template <>
inline constexpr chiasma_dtype kDtypeOf<std::uint8_t> = CHIASMA_UINT8;
template <>
inline constexpr chiasma_dtype kDtypeOf<std::int32_t> = CHIASMA_INT32;
template <>
inline constexpr chiasma_dtype kDtypeOf<std::int64_t> = CHIASMA_INT64;
template <>
inline constexpr chiasma_dtype kDtypeOf<Bfloat16> = CHIASMA_BFLOAT16;
template <>
inline constexpr chiasma_dtype kDtypeOf<float> = CHIASMA_FLOAT32;
template <>
inline constexpr chiasma_dtype kDtypeOf<double> = CHIASMA_FLOAT64;

// A contiguous view of memory that the caller keeps alive. The library never writes through an input, so const memory
// is fine there.
inline chiasma_tensor tensor(const void* data, chiasma_dtype dtype, chiasma_device device,
                             std::initializer_list<std::int64_t> shape) {
  if (shape.size() > CHIASMA_MAX_RANK) {
    throw Error(CHIASMA_INVALID_ARGUMENT, "a tensor has at most " + std::to_string(CHIASMA_MAX_RANK) + " dimensions");
  }
  return chiasma_contiguous(const_cast<void*>(data), dtype, device, static_cast<std::int32_t>(shape.size()),
                            shape.begin());
}

// The same for host memory whose size is known: it must be exactly what the shape needs.
template <typename T>
chiasma_tensor tensor(std::span<T> data, std::initializer_list<std::int64_t> shape) {
  using Element = std::remove_const_t<T>;
  static_assert(kDtypeOf<Element> != 0, "no chiasma dtype for this element type");
  std::size_t elements = 1;
  for (const std::int64_t extent : shape) elements *= static_cast<std::size_t>(extent);
  if (elements != data.size()) {
    throw Error(CHIASMA_INVALID_ARGUMENT,
                "the shape has " + std::to_string(elements) + " elements, the span " + std::to_string(data.size()));
  }
  return tensor(data.data(), kDtypeOf<Element>, kCpu, shape);
}

// A decode call with every optional tensor absent and the format's default scale.
inline chiasma_decode_args decode_args(chiasma_kv_format format) {
  chiasma_decode_args args{};
  args.format = format;
  args.sm_scale = chiasma_default_sm_scale(format);
  return args;
}

// A kernel and a schedule for one problem shape. Cheap to move; run() may be called from several threads at once as
// long as each brings a workspace of its own.
class DecodePlan {
 public:
  explicit DecodePlan(const chiasma_decode_args& args, const chiasma_plan_options& options = {}) {
    chiasma_decode_plan* plan = nullptr;
    check(chiasma_decode_plan_create(&args, &options, &plan));
    plan_.reset(plan);
  }

  std::size_t workspace_bytes() const { return chiasma_decode_plan_workspace_bytes(plan_.get()); }
  std::string kernel() const { return chiasma_decode_plan_kernel(plan_.get()); }
  std::string text() const { return chiasma_decode_plan_text(plan_.get()); }

  // workspace: workspace_bytes() or more, 256-byte aligned, on the plan's device.
  void run(const chiasma_decode_args& args, std::span<std::byte> workspace, void* stream = nullptr) const {
    check(chiasma_decode_run(plan_.get(), &args, workspace.data(), workspace.size(), stream));
  }

 private:
  struct Destroy {
    void operator()(chiasma_decode_plan* plan) const { chiasma_decode_plan_destroy(plan); }
  };
  std::unique_ptr<chiasma_decode_plan, Destroy> plan_;
};

// Host scratch memory with the alignment that DecodePlan::run wants.
class HostWorkspace {
 public:
  explicit HostWorkspace(std::size_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kAlignment}))) {}
  std::span<std::byte> span() { return {data_.get(), bytes_}; }

 private:
  static constexpr std::size_t kAlignment = 256;
  struct Free {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{kAlignment}); }
  };
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

// Plans and runs on the CPU in one call.
inline void decode_on_cpu(const chiasma_decode_args& args, const chiasma_plan_options& options = {}) {
  const DecodePlan plan(args, options);
  HostWorkspace workspace(plan.workspace_bytes());
  plan.run(args, workspace.span());
}

inline void merge(const chiasma_merge_args& args, void* stream = nullptr) {
  check(chiasma_merge(&args, stream));
}
inline void quantize(const chiasma_quantize_args& args, void* stream = nullptr) {
  check(chiasma_quantize(&args, stream));
}
inline void dequantize(const chiasma_dequantize_args& args, void* stream = nullptr) {
  check(chiasma_dequantize(&args, stream));
}
inline void gather_dequantize(const chiasma_gather_args& args, void* stream = nullptr) {
  check(chiasma_gather_dequantize(&args, stream));
}
inline void translate_indices(const chiasma_translate_args& args, void* stream = nullptr) {
  check(chiasma_translate_indices(&args, stream));
}

inline std::vector<chiasma_device_info> devices() {
  std::vector<chiasma_device_info> found(static_cast<std::size_t>(chiasma_device_count()));
  for (std::size_t number = 0; number < found.size(); ++number) {
    check(chiasma_device_query(static_cast<std::int32_t>(number), &found[number]));
  }
  return found;
}

inline std::vector<chiasma_kernel_info> kernels() {
  std::vector<chiasma_kernel_info> found(static_cast<std::size_t>(chiasma_kernel_count()));
  for (std::size_t number = 0; number < found.size(); ++number) {
    check(chiasma_kernel_query(static_cast<std::int32_t>(number), &found[number]));
  }
  return found;
}

}  // namespace chiasma
