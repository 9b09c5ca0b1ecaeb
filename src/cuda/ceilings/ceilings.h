// Measures what this device can do: the rates that bound a decode kernel, each by a small kernel that does nothing
// else. Inputs are random, since zeros draw less power and run faster. No CUDA header is needed to include this.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "api/status.h"

namespace chiasma::ceilings {

// One measured rate; higher is better.
struct Figure {
  std::string id;    // stable: names the figure in result files and budgets
  std::string what;  // one line for a reader
  std::string
      unit;        // of a multiprocessor: "B/clk/SM", "flop/clk/SM", "values/clk/SM"; or "TB/s", "TFLOPS" of the device
  double lot = 0;  // an amount worth knowing the time of; 0: none
  std::string lot_name{};
  double distinct = 1;            // share of the amount that no other multiprocessor also gets
  std::vector<double> samples{};  // one a launch
  double sm_mhz = 0;              // SM clock meanwhile
};

// Null if there is none of that id.
inline const Figure* find(const std::vector<Figure>& figures, std::string_view id) {
  for (const Figure& figure : figures) {
    if (figure.id == id) return &figure;
  }
  return nullptr;
}

// All figures, in the order they are to be shown. Needs about 6 GB of device memory for rows that no cache holds; with
// less free memory a smaller pool is used and the `what` of those figures says so.
Status measure(std::int32_t device, std::vector<Figure>* figures);

// Average SM clock over whatever the default stream works on between start() and stop_mhz(). The clock reacts to load
// within microseconds, so it must be counted during the work, not read behind it.
class ClockMeter {
 public:
  ClockMeter();
  ~ClockMeter();
  ClockMeter(const ClockMeter&) = delete;
  ClockMeter& operator=(const ClockMeter&) = delete;

  void start();
  double stop_mhz();  // waits for the stream; 0 when something failed

 private:
  void* readings_[2] = {};
};

}  // namespace chiasma::ceilings
