// An output file that is either complete or absent: written under a temporary name in the same directory, flushed to
// disk and renamed. Every failure throws OutputError and leaves the old file, if there was one, as it was.
#pragma once

#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>

namespace chiasma::cli {

class OutputError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Removes the temporary of the OutputFile that is being written, if any. For signal handlers.
void remove_unfinished_output() noexcept;

class OutputFile {
 public:
  // Creates the temporary file, so that a place that cannot be written is known before the work starts.
  explicit OutputFile(const std::string& path);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  // Without commit(), removes the temporary. An interrupt (SIGINT, SIGTERM, a closed pipe, ...) does so, too.
  ~OutputFile();

  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  [[noreturn]] void fail(const std::string& action) const;

  std::string path_;    // as the user wrote it, for messages
  std::string target_;  // symbolic links resolved: they are written through, not replaced
  std::string temporary_;
  int descriptor_ = -1;
};

}  // namespace chiasma::cli
