// From what Python passes to what the C interface takes.
#pragma once

#include <tvm/ffi/tvm_ffi.h>

#include <cstdint>
#include <string>

#include "chiasma/chiasma.h"
#include "failure.h"
#include "formats.h"

namespace chiasma::python {

// Which dtypes an argument may have; several are joined with |. Raw uint16 counts as bf16, for frameworks without it.
enum Accepts : unsigned {
  kBfloat16 = 1,
  kFloat32 = 2,
  kInt32 = 4,
  kInt64 = 8,
  kBytes = 16,  // uint8, int8 or float8_e4m3fn
};

// One argument of a call.
struct Argument {
  const char* name;
  const TVMFFIAny* value;
};

bool is_none(Argument argument);
// The view of a tensor, which lives as long as the call. Throws for anything else.
const DLTensor* as_dltensor(Argument argument);
// None gives an absent tensor. "reduced" tensors have one dimension less than the C interface wants: an extent of 1 is
// put in front of dimension `unit_dim`; -1 puts none in.
chiasma_tensor as_tensor(Argument argument, unsigned accepts, int unit_dim = -1);
std::string shape_text(const DLTensor& tensor);

std::int64_t as_int(Argument argument);
double as_double(Argument argument);
bool as_bool(Argument argument);
// NULL for None. The text lives as long as the call.
const char* as_text(Argument argument);

// The CUDA stream: an address, or None for the one that the framework named for this call.
void* as_stream(Argument argument, chiasma_device device);

// A format's number, or 0 to tell it by the cache's dtype and width.
chiasma_kv_format as_format(Argument format, Argument cache);
// What the codes of a cache are multiplied by; None gives what stands for 1.
double as_kv_scale(Argument argument);
// The cache of a format.
chiasma_tensor as_cache(Argument argument, chiasma_kv_format format);

}  // namespace chiasma::python
