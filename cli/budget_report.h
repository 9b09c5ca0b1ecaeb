// What `chiasma budget` shows: figures and kernels, as text and as JSON.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cli/budget.h"
#include "cli/result_file.h"
#include "cuda/ceilings/ceilings.h"

namespace chiasma::cli {

using Figures = std::vector<ceilings::Figure>;

// A kernel's time on a case.
struct KernelTime {
  std::string kernel;
  harness::CheckReport report;
  harness::Statistics loop_us;
  double sm_mhz = 0;
};

// Model and measurement of a kernel.
struct Compared {
  KernelTime time;
  Budget budget;
  double blocks = 0;  // a multiprocessor, in one call
  double clk = 0;     // a block
  double tflops = 0;
};

Compared compare(const KernelTime& time, std::span<const tile::Need> needs, const Figures& figures,
                 const harness::Case& spec, int multiprocessors);

void print_figures(const Figures& figures, int multiprocessors);
void print_kernel(const Compared& compared);
Json figures_json(const Figures& figures, int multiprocessors);
Json kernel_json(const Compared& compared);

}  // namespace chiasma::cli
