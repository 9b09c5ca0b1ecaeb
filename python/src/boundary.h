// The functions that Python sees. Each takes and returns what tvm-ffi's C calling convention says; a failure is a text
// as its result (failure.h), which costs less than an error of tvm-ffi's and has no native stack trace in it.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <span>

#include "failure.h"

namespace chiasma::python {

using Arguments = std::span<const TVMFFIAny>;
using Result = tvm::ffi::Any;  // None says that all went well

inline Result failure_text(FailureKind kind, const std::string& message) {
  return tvm::ffi::String(std::string(1, static_cast<char>(kind)) + message);
}

// PyTorch gives a tensor whose memory was taken away (storage().resize_(0)) the address of its offset from NULL. An
// address so low makes Python look before anything else is done, and call again with the last argument true.
inline bool is_suspicious(const TVMFFIAny& value) {
  constexpr std::uintptr_t kLow = std::uintptr_t{1} << 40;
  if (value.type_index != kTVMFFITensor) return false;
  const DLTensor& tensor = *TVMFFITensorGetDLTensorPtr(value.v_obj);
  return tensor.data != nullptr && reinterpret_cast<std::uintptr_t>(tensor.data) < kLow;
}

inline bool is_unchecked(Arguments arguments) {
  return !arguments.empty() && arguments.back().type_index == kTVMFFIBool && arguments.back().v_int64 == 0 &&
         std::any_of(arguments.begin(), arguments.end(), is_suspicious);
}

template <Result (*function)(Arguments)>
Result call(Arguments arguments) {
  try {
    if (is_unchecked(arguments)) return failure_text(FailureKind::look_first, "");
    return function(arguments);
  } catch (const Failure& failure) {
    return failure_text(failure.kind, failure.message);
  } catch (const std::bad_alloc&) {
    return failure_text(FailureKind::memory, "a host memory allocation failed");
  } catch (const std::exception& error) {
    // An allocator's message, such as that the device has no memory left, comes this way.
    return failure_text(FailureKind::runtime, error.what());
  }
}

}  // namespace chiasma::python

// Exports `function`, Result(Arguments), as the module's `name`, which takes `count` arguments.
#define CHIASMA_PYTHON_EXPORT(name, function, count)                                                               \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t num_args,               \
                                                     TVMFFIAny* result);                                           \
  int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {                        \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                                     \
    TVM_FFI_CHECK(num_args == (count), TypeError) << #name " takes " << (count) << " arguments, not " << num_args; \
    ::tvm::ffi::Any value = ::chiasma::python::call<function>({args, static_cast<std::size_t>(count)});            \
    *result = ::tvm::ffi::details::AnyUnsafe::MoveAnyToTVMFFIAny(std::move(value));                                \
    TVM_FFI_SAFE_CALL_END();                                                                                       \
  }
