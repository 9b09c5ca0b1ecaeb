#include "cli/result_file.h"

#include <cstdint>
#include <ctime>
#include <span>

#include "chiasma/chiasma.h"
#include "cli/error.h"

// The build passes the commit it is made from.
#ifndef CHIASMA_GIT_COMMIT
#define CHIASMA_GIT_COMMIT "unknown"
#endif

namespace chiasma::cli {

Json statistics_json(const harness::Statistics& statistics) {
  return {{"median", statistics.median},
          {"min", statistics.min},
          {"p10", statistics.p10},
          {"p90", statistics.p90},
          {"n", statistics.n}};
}

Json report_json(const harness::CheckReport& report) {
  Json json = {{"passed", report.passed},
               {"rows_checked", report.rows_checked},
               {"out_relative_l2_mean", report.mean_relative_l2},
               {"out_relative_l2_max", report.max_relative_l2},
               {"lse_max", report.max_lse_error},
               {"score_deviation_max", report.max_score_deviation}};
  if (!report.failure.empty()) json["failure"] = report.failure;
  return json;
}

const char* git_commit() {
  return CHIASMA_GIT_COMMIT;
}

Json result_head(const std::string& tool, const harness::Device& device) {
  return {{"tool", tool},
          {"version", chiasma_version()},
          {"commit", git_commit()},
          {"unix_time", static_cast<std::int64_t>(std::time(nullptr))},
          {"machine", facts_json(device.describe())}};
}

ResultFile::ResultFile(const std::string& path) {
  try {
    if (!path.empty()) file_.emplace(path);
  } catch (const OutputError& error) {
    fail_input("--json: {}", error.what());
  }
}

void ResultFile::write(const Json& json) {
  if (!file_) return;
  try {
    const std::string text = json.dump(2) + "\n";
    file_->write(std::as_bytes(std::span(text)));
    file_->commit();
  } catch (const OutputError& error) {
    fail_input("--json: {}", error.what());
  }
}

}  // namespace chiasma::cli
