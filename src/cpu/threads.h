// How many threads a parallel region may have, and how they compute.
#pragma once

#include <cfenv>

namespace chiasma::cpu {

// At most `wanted`, and 1 in a process that was forked off one with this library: OpenMP's threads stayed behind, and
// the runtime would wait for them for ever.
int team_size(int wanted);

// Threads that the process may use.
int available_threads();

// The default floating-point environment for as long as it lives: host programs switch to flushing denormal numbers to
// zero, or other rounding, for the thread that calls or for all that it starts. For the caller, and in each thread of
// a team, since those have the environment of whoever started them.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&callers_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t callers_;
};

}  // namespace chiasma::cpu
