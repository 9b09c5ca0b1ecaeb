// Result files of bench, budget and verify: JSON that says first which tool, commit and machine it comes from.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/output_file.h"
#include "harness/check.h"
#include "harness/device.h"
#include "harness/timing.h"

namespace chiasma::cli {

using Json = nlohmann::ordered_json;

template <typename Value>
Json facts_json(const std::vector<std::pair<std::string, Value>>& facts) {
  Json json = Json::object();
  for (const auto& [key, value] : facts) json[key] = value;
  return json;
}

Json statistics_json(const harness::Statistics& statistics);
Json report_json(const harness::CheckReport& report);

// The commit that the program was built from; "unknown" outside a git checkout.
const char* git_commit();
// tool, version, commit, time, machine.
Json result_head(const std::string& tool, const harness::Device& device);

// The file of an option --json; without a path nothing is written. Throws CommandError.
class ResultFile {
 public:
  // Opened before the work that fills it is done.
  explicit ResultFile(const std::string& path);
  void write(const Json& json);

 private:
  std::optional<OutputFile> file_;
};

}  // namespace chiasma::cli
