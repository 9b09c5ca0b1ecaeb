// Checks of one tensor argument, each with a message that names the argument, its value and what is allowed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>

#include "api/status.h"

namespace chiasma {

struct NamedTensor {
  const char* name;
  const chiasma_tensor& tensor;
};

inline constexpr std::int64_t kAnyExtent = -1;

int dtype_bytes(chiasma_dtype dtype);
std::string shape_text(const chiasma_tensor& tensor);
std::string device_text(chiasma_device device);
bool is_empty(const chiasma_tensor& tensor);  // some extent is 0

// Rank, dtype, extents and strides that address memory without overflow. `expected` has one entry a dimension,
// kAnyExtent where anything >= 0 goes; `shape_names` is how the message spells the shape, such as "[b, s_q, topk]".
Status check_tensor(NamedTensor argument, std::initializer_list<chiasma_dtype> dtypes,
                    std::initializer_list<std::int64_t> expected, const char* shape_names);
Status check_last_contiguous(NamedTensor argument);
// data present (unless empty) and aligned.
Status check_data(NamedTensor argument, std::int64_t alignment);
// No element shares memory with another one of the same tensor.
Status check_no_self_overlap(NamedTensor argument);
// Refuses a writable tensor that starts where an input starts, or whose packed bytes meet the packed bytes of an input.
// Interleaved strided views of one allocation are legal and are not looked into.
Status check_disjoint(NamedTensor output, NamedTensor input);
Status check_same_device(NamedTensor argument, NamedTensor reference);

}  // namespace chiasma
