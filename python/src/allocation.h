// Memory from the caller's framework.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <initializer_list>

#include "chiasma/chiasma.h"

namespace chiasma::python {

// A contiguous tensor from the framework that the call's tensors came from. Throws where that framework has not told
// tvm-ffi how to allocate; Python then passes the workspace and int32 indices.
tvm::ffi::Tensor allocate(std::initializer_list<std::int64_t> shape, chiasma_dtype dtype, chiasma_device device);

// `bytes` of scratch memory at a multiple of 256. Freed with this object: a framework's allocator keeps memory of one
// stream to work queued behind it, so that the kernel which uses it is safe.
class Workspace {
 public:
  Workspace(std::size_t bytes, chiasma_device device);
  void* data() const { return data_; }

 private:
  tvm::ffi::Optional<tvm::ffi::Tensor> tensor_;
  void* data_ = nullptr;
};

}  // namespace chiasma::python
