// How a command fails: a message for stderr and the exit code that goes with it.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "chiasma/chiasma.h"

namespace chiasma::cli {

inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;  // the work was done and a result was wrong
inline constexpr int kExitBadInput = 2;     // bad usage, or an input or output file that cannot be used
inline constexpr int kExitUnavailable = 3;  // the device or kernel cannot do it here

class CommandError : public std::runtime_error {
 public:
  CommandError(int exit_code, const std::string& message) : std::runtime_error(message), exit_code_(exit_code) {}
  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

template <typename... Args>
[[noreturn]] void fail_input(fmt::format_string<Args...> format, Args&&... args) {
  throw CommandError(kExitBadInput, fmt::format(format, std::forward<Args>(args)...));
}

// Throws unless `status` is CHIASMA_OK, with the library's message behind `context` (which file or case it was).
inline void check_status(chiasma_status status, const std::string& context) {
  if (status == CHIASMA_OK) return;
  const int exit_code = status == CHIASMA_INVALID_ARGUMENT ? kExitBadInput : kExitUnavailable;
  throw CommandError(exit_code, fmt::format("{}: {}", context, chiasma_last_error()));
}

}  // namespace chiasma::cli
