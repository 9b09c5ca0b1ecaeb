#include "cli/case_list.h"

#include <CLI/CLI.hpp>

#include "cli/error.h"

namespace chiasma::cli {

void add_case_options(CLI::App& command, CaseSources& sources) {
  command.add_option("--case", sources.lines, "a case line such as 'decode b=1 h=16 topk=65 scale=amax'; repeatable")
      ->type_name("LINE")
      ->allow_extra_args(false);
  command.add_option("--cases", sources.files, "a file of case lines; repeatable")
      ->type_name("FILE")
      ->allow_extra_args(false);
}

std::vector<harness::Case> collect_cases(const CaseSources& sources, const char* fallback) {
  std::vector<harness::Case> all;
  std::string error;
  for (const std::string& path : sources.files) {
    std::vector<harness::Case> cases;
    if (!harness::read_case_file(path, &cases, &error)) fail_input("--cases {}", error);
    all.insert(all.end(), cases.begin(), cases.end());
  }
  for (const std::string& line : sources.lines) {
    harness::Case spec;
    if (!harness::parse_case(line, &spec, &error)) fail_input("--case '{}': {}", line, error);
    all.push_back(spec);
  }
  if (sources.files.empty() && sources.lines.empty() &&
      !harness::read_cases(fallback, "built-in cases", &all, &error)) {
    throw CommandError(kExitBadInput, error);
  }
  if (all.empty()) fail_input("--cases: there is no case in the files given");
  return all;
}

}  // namespace chiasma::cli
