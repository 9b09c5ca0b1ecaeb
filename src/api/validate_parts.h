// What the checks of a decode and those of the cache operations share.
#pragma once

#include <cstdint>

#include "api/problem.h"
#include "api/tensor_check.h"
#include "api/validate.h"

namespace chiasma {

template <typename T>
T* data_as(const chiasma_tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

// A dimension of one element is never stepped along, and its stride may be anything; 0 keeps it out of all arithmetic.
inline std::int64_t stride_of(const chiasma_tensor& tensor, int dim) {
  return tensor.shape[dim] > 1 ? tensor.stride[dim] : 0;
}

Status require(NamedTensor argument);
Status check_format(chiasma_kv_format format);
// kv_scale of the C structs: only formats with one scale for the whole cache have any but 1.
Status check_kv_scale(double kv_scale, KvFormat format, float* scale);
Status check_cache(const char* name, const chiasma_tensor& given, KvFormat format, DataCheck data, KvPool* pool);
// A tensor that is written to.
Status check_output(NamedTensor output, NamedTensor reference, DataCheck data);

}  // namespace chiasma
