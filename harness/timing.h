// Measures prepared runs against each other. docs/measuring.md has the rules and their reasons.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "harness/run.h"

namespace chiasma::harness {

// Of a set of samples, in microseconds per call.
struct Statistics {
  double median = 0;
  double min = 0;
  double p10 = 0;
  double p90 = 0;
  std::int64_t n = 0;  // samples
};

// Percentiles by linear interpolation between neighbours in order. All zero for no samples.
Statistics summarize(std::vector<double> samples);

struct Timing {
  Statistics cold;  // each call after a flush of the caches
  Statistics loop;  // calls back to back
  std::int64_t calls_per_loop_sample = 1;
  std::vector<std::pair<std::string, double>> sensors_before, sensors_after;
};

struct TimingOptions {
  double seconds_per_runner = 3.0;  // of measuring; the least number of samples is taken even if it needs longer
  std::int64_t min_samples = 7;
  std::int64_t max_samples = 300;
  std::int64_t warmup_calls = 3;
};

// One result a runner, in order. All of one device; their samples alternate, so that drift of the machine meets all
// alike. False with *error set when a run fails.
bool time_runners(const std::vector<Runner*>& runners, const TimingOptions& options, std::vector<Timing>* results,
                  RunError* error);

}  // namespace chiasma::harness
