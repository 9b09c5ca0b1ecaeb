#include "allocation.h"

#include <tvm/ffi/extra/c_env_api.h>

namespace chiasma::python {
namespace {

constexpr std::uintptr_t kAlignment = 256;

DLDataType dlpack_dtype(chiasma_dtype dtype) {
  switch (dtype) {
    case CHIASMA_UINT8: return {kDLUInt, 8, 1};
    case CHIASMA_INT32: return {kDLInt, 32, 1};
    case CHIASMA_INT64: return {kDLInt, 64, 1};
    case CHIASMA_BFLOAT16: return {kDLBfloat, 16, 1};
    case CHIASMA_FLOAT32: return {kDLFloat, 32, 1};
    case CHIASMA_FLOAT64: return {kDLFloat, 64, 1};
  }
  return {kDLUInt, 8, 1};
}

}  // namespace

tvm::ffi::Tensor allocate(std::initializer_list<std::int64_t> shape, chiasma_dtype dtype, chiasma_device device) {
  const DLDevice dlpack_device{static_cast<DLDeviceType>(device.kind), device.index};
  return tvm::ffi::Tensor::FromEnvAlloc(TVMFFIEnvTensorAlloc, tvm::ffi::ShapeView(shape.begin(), shape.size()),
                                        dlpack_dtype(dtype), dlpack_device);
}

Workspace::Workspace(std::size_t bytes, chiasma_device device) {
  if (bytes == 0) return;
  // CUDA allocators align to 256 or more by themselves; asking for more is only for those that do not.
  const tvm::ffi::Tensor tensor = allocate({static_cast<std::int64_t>(bytes + kAlignment)}, CHIASMA_UINT8, device);
  tensor_ = tensor;
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  data_ = static_cast<std::byte*>(tensor.data_ptr()) + (kAlignment - address % kAlignment) % kAlignment;
}

}  // namespace chiasma::python
