#include "harness/endurance.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>

#include "harness/nvml.h"

namespace chiasma::harness {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kSampleUs = 1e3;
// Long enough that the pause between two batches, in which the host reads meters, does not show.
constexpr double kBatchUs = 50e3;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void pause(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Microseconds that `calls` calls take; negative after a failure.
double time_calls(Runner& runner, std::int64_t calls, RunError* error) {
  bool ok = true;
  const double us = runner.device().time_us([&] {
    for (std::int64_t n = 0; n < calls && ok; ++n) ok = runner.launch(error);
  });
  return ok ? us : -1.0;
}

std::int64_t calls_in(double us, double one_call_us) {
  return std::max<std::int64_t>(1, std::llround(us / std::max(one_call_us, 0.1)));
}

double mean_of_fastest_tenth(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const std::size_t count = std::max<std::size_t>(1, samples.size() / 10);
  return std::accumulate(samples.begin(), samples.begin() + static_cast<std::ptrdiff_t>(count), 0.0) /
         static_cast<double>(count);
}

bool measure_burst(Runner& runner, const EnduranceOptions& options, Endurance* result, RunError* error) {
  const double one_call = time_calls(runner, 1, error);
  if (one_call < 0) return false;
  const std::int64_t calls = calls_in(kSampleUs, one_call);
  pause(options.pause_seconds);
  std::vector<double> samples;
  const Clock::time_point begin = Clock::now();
  do {
    const double us = time_calls(runner, calls, error);
    if (us < 0) return false;
    samples.push_back(us / static_cast<double>(calls));
  } while (seconds_since(begin) < options.burst_seconds);
  result->burst_us = mean_of_fastest_tenth(samples);
  result->burst_samples = static_cast<std::int64_t>(samples.size());
  return true;
}

// Calls back to back for a while; adds up what the meters say.
class Stretch {
 public:
  Stretch(Runner& runner, std::int64_t calls_a_batch) : runner_(runner), calls_a_batch_(calls_a_batch) {}

  bool run(double seconds, RunError* error) {
    const Nvml* meters = runner_.device().meters();
    const Clock::time_point begin = Clock::now();
    const std::optional<double> energy_before = meters == nullptr ? std::nullopt : meters->energy_joules();
    do {
      const double us = time_calls(runner_, calls_a_batch_, error);
      if (us < 0) return false;
      total_us_ += us;
      calls_ += calls_a_batch_;
      if (meters != nullptr) read(*meters);
    } while (seconds_since(begin) < seconds);
    const std::optional<double> energy_after = meters == nullptr ? std::nullopt : meters->energy_joules();
    if (energy_before && energy_after) {
      joules_ = *energy_after - *energy_before;
      seconds_ = seconds_since(begin);
    }
    return true;
  }

  void store(Endurance* result) const {
    result->sustained_calls = calls_;
    result->sustained_us = total_us_ / static_cast<double>(calls_);
    if (num_clocks_ > 0) result->sm_mhz = sum_of_mhz_ / static_cast<double>(num_clocks_);
    if (joules_) {
      result->watts = *joules_ / seconds_;
      result->joules_a_call = *joules_ / static_cast<double>(calls_);
    }
    result->clock_event_reasons = clock_event_names(reasons_);
  }

 private:
  void read(const Nvml& meters) {
    reasons_ |= meters.clock_event_reasons();
    if (const std::optional<double> mhz = meters.sm_mhz()) {
      sum_of_mhz_ += *mhz;
      ++num_clocks_;
    }
  }

  Runner& runner_;
  std::int64_t calls_a_batch_;
  std::int64_t calls_ = 0;
  double total_us_ = 0;
  double sum_of_mhz_ = 0;
  std::int64_t num_clocks_ = 0;
  std::uint64_t reasons_ = 0;
  std::optional<double> joules_;
  double seconds_ = 0;
};

}  // namespace

bool measure_endurance(Runner& runner, const EnduranceOptions& options, Endurance* result, RunError* error) {
  if (!measure_burst(runner, options, result, error)) return false;
  const std::int64_t calls = calls_in(kBatchUs, result->burst_us);
  pause(options.pause_seconds);
  // The first half brings clock and temperature to where they stay.
  if (!Stretch(runner, calls).run(options.sustained_seconds / 2, error)) return false;
  Stretch second_half(runner, calls);
  if (!second_half.run(options.sustained_seconds / 2, error)) return false;
  second_half.store(result);
  return true;
}

}  // namespace chiasma::harness
