// How a call fails inside this module: an exception of ours, turned into a text at the boundary. Nothing is thrown
// across it.
#pragma once

#include <sstream>
#include <string>
#include <utility>

#include "chiasma/chiasma.h"

namespace chiasma::python {

// The first character of a returned text; python/chiasma/_native.py turns it into the class of the exception.
enum class FailureKind : char {
  value = 'V',
  type = 'T',
  not_implemented = 'N',
  runtime = 'R',
  memory = 'M',
  look_first = 'S',    // some tensor may have no memory (boundary.h)
  no_format = 'F',     // the message is the cache's name: Python knows the list of formats
  not_a_tensor = 'X',  // the message is the argument's name: only Python knows what the caller gave
};

struct Failure {
  FailureKind kind;
  std::string message;
};

template <typename... Parts>
[[noreturn]] void fail(FailureKind kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Failure{kind, text.str()};
}

inline FailureKind kind_of(chiasma_status status) {
  switch (status) {
    case CHIASMA_INVALID_ARGUMENT: return FailureKind::value;
    case CHIASMA_UNSUPPORTED: return FailureKind::not_implemented;
    case CHIASMA_OUT_OF_MEMORY: return FailureKind::memory;
    default: return FailureKind::runtime;
  }
}

// Throws the library's message unless the call went well.
inline void check(chiasma_status status) {
  if (status != CHIASMA_OK) throw Failure{kind_of(status), chiasma_last_error()};
}

}  // namespace chiasma::python
