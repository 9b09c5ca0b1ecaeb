// The bytes of a file, mapped read-only: they stay on disk until they are touched.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace chiasma::cli {

class MappedFile {
 public:
  // A regular file. Throws SafetensorsError where it cannot be read, and CommandError (exit code 3) where there is no
  // memory to map it. If the file becomes shorter later on, touching what is gone ends the program with a message and
  // exit code 2, and without an output file: no exception can come out of a load instruction.
  static std::shared_ptr<const MappedFile> open(const std::string& path);

  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const { return {address_, bytes_}; }
  // Throws SafetensorsError if the file is shorter than it was. Where it lost less than a page of memory, nothing else
  // tells: what is gone reads as zeros. For the end of a command, before its result is kept.
  void check_length() const;
  // Bytes that are not needed for now: they leave memory, and are read again if touched.
  void release(std::span<const std::byte> part) const;

 private:
  struct Watched;

  explicit MappedFile(std::string path) : path_(std::move(path)) {}

  std::string path_;
  int descriptor_ = -1;
  const std::byte* address_ = nullptr;
  std::size_t bytes_ = 0;
  Watched* watched_ = nullptr;
};

}  // namespace chiasma::cli
