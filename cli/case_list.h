// --case and --cases of verify and bench.
#pragma once

#include <string>
#include <vector>

#include "harness/case.h"

namespace CLI {
class App;
}

namespace chiasma::cli {

struct CaseSources {
  std::vector<std::string> lines;
  std::vector<std::string> files;
};

void add_case_options(CLI::App& command, CaseSources& sources);

// All cases of the files, then those of the lines; where neither is given, those of `fallback`, a text of case lines.
// Throws CommandError with exit code 2 for a line that is wrong.
std::vector<harness::Case> collect_cases(const CaseSources& sources, const char* fallback);

}  // namespace chiasma::cli
