// Safetensors files: an 8-byte little-endian length, a JSON header of that length, then the tensors' raw bytes. The
// reader trusts nothing: every field is checked before it is used, and whatever is wrong is reported with the file, the
// tensor, the field and its value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/mapped_file.h"
#include "cli/output_file.h"

namespace chiasma::cli {

// What is wrong with a file, or with what was to be written.
class SafetensorsError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Dtype {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
  kC64,
};

const char* dtype_name(Dtype dtype);  // as in files: "BF16"
int dtype_bits(Dtype dtype);

struct SafetensorsTensor {
  std::string name;
  Dtype dtype;
  std::vector<std::int64_t> shape;  // extents >= 0; their product times the element size does not overflow
  std::span<const std::byte> data;  // starts at any address: files need not align their tensors
};

using SafetensorsMetadata = std::map<std::string, std::string>;

// "BF16 [2, 3]", for messages.
std::string describe(const SafetensorsTensor& tensor);

// Text from a file made fit for a terminal: everything but printable ASCII escaped, excess length cut.
std::string printable(std::string_view text);

class SafetensorsFile {
 public:
  // The longest header that is read; the format's reference implementation has the same bound.
  static constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

  // Maps a regular file. The data stays on disk until it is touched.
  static SafetensorsFile open(const std::string& path);
  // Reads a file's bytes from memory, which must outlive the result. `path` is for messages only.
  static SafetensorsFile parse(std::span<const std::byte> bytes, std::string path);

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }  // in the order of their data
  const SafetensorsTensor* find(std::string_view name) const;                 // null: not there
  const SafetensorsMetadata& metadata() const { return metadata_; }
  // Where the tensors' data begins in the file, and where that of one of its tensors does.
  std::uint64_t data_offset() const { return data_offset_; }
  std::uint64_t offset_of(const SafetensorsTensor& tensor) const {
    return tensor.data.data() == nullptr ? data_offset_ : static_cast<std::uint64_t>(tensor.data.data() - begin_);
  }
  // Throws SafetensorsError if the file became shorter while its data was read.
  void check_length() const;
  // A part of a tensor's data that is not needed for now leaves memory, if it came from a file.
  void release(std::span<const std::byte> part) const;

 private:
  SafetensorsFile() = default;

  std::string path_;
  const std::byte* begin_ = nullptr;
  std::uint64_t data_offset_ = 0;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, std::size_t, std::less<>> by_name_;
  SafetensorsMetadata metadata_;
  std::shared_ptr<const MappedFile> mapping_;
};

// Writes a file (as OutputFile does: complete or absent). Declare every tensor, begin(), write() their bytes in the
// order of declaration, in pieces of any size, commit().
class SafetensorsWriter {
 public:
  void set_metadata(SafetensorsMetadata metadata) { metadata_ = std::move(metadata); }
  void declare(std::string name, Dtype dtype, std::vector<std::int64_t> shape);
  void begin(const std::string& path);
  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  struct Declared {
    std::string name;
    Dtype dtype;
    std::vector<std::int64_t> shape;
    std::uint64_t bytes;
  };

  std::string header() const;

  SafetensorsMetadata metadata_;
  std::vector<Declared> tensors_;
  std::optional<OutputFile> file_;
  std::uint64_t bytes_left_ = 0;
};

}  // namespace chiasma::cli
