#include "cli/safetensors_header.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

namespace chiasma::cli {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();

// Receives the header's tokens and builds tensors from them. Event-driven rather than through a parsed document because
// a document keeps only the last of two equal names; and nothing nests deeper than the grammar allows, since the first
// bracket too many ends the reading.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(SafetensorsHeader& header) : header_(header) {}

  const std::string& error() const { return error_; }

  bool null() override { return place_ == Place::kTop && key_ == kMetadataKey ? true : scalar("null"); }
  bool boolean(bool value) override { return scalar(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return scalar(fmt::format("{}", value)); }
  bool number_float(number_float_t, const string_t& text) override { return scalar(printable(text)); }
  bool binary(binary_t&) override { return scalar("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kArray) return scalar(fmt::format("{}", value));
    if (key_ == "data_offsets") {
      offsets_.push_back(value);
      return true;
    }
    if (value > kMaxBytes) return fail("{}: extent {} is too large", where(), value);
    current_.shape.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata[key_] = value;
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return scalar(fmt::format("\"{}\"", printable(value)));
    try {
      current_.dtype = parse_dtype(value, where());
    } catch (const SafetensorsError& error) {
      return fail("{}", error.what());
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kOutside) {
      place_ = Place::kTop;
      return true;
    }
    if (place_ != Place::kTop) return scalar("an object");
    if (key_ == kMetadataKey) {
      place_ = Place::kMetadata;
      return true;
    }
    place_ = Place::kTensor;
    current_ = {};
    current_.name = key_;
    offsets_.clear();
    fields_.clear();
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || key_ == "dtype") return scalar("an array");
    place_ = Place::kArray;
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool key(string_t& name) override {
    key_ = name;
    if (place_ == Place::kTop) {
      if (names_.insert(name).second) return true;
      return fail("the name \"{}\" occurs twice", printable(name));
    }
    if (place_ == Place::kMetadata) {
      if (header_.metadata.try_emplace(name).second) return true;
      return fail("__metadata__: the key \"{}\" occurs twice", printable(name));
    }
    if (name != "dtype" && name != "shape" && name != "data_offsets") {
      return fail("tensor \"{}\": unknown field \"{}\"", printable(current_.name), printable(name));
    }
    if (fields_.insert(name).second) return true;
    return fail("{} occurs twice", where());
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (!fields_.contains(field)) return fail("tensor \"{}\": {} is missing", printable(current_.name), field);
      }
      if (offsets_.size() != 2) {
        return fail("tensor \"{}\": data_offsets: must be 2 integers, not {}", printable(current_.name),
                    offsets_.size());
      }
      current_.begin = offsets_[0];
      current_.end = offsets_[1];
      header_.tensors.push_back(std::move(current_));
    }
    place_ = place_ == Place::kTop ? Place::kOutside : Place::kTop;
    return true;
  }

  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view text = error.what();
    const std::size_t start = text.find("] ");  // behind the JSON library's own error number
    return fail("the header is not valid JSON: {}", printable(text.substr(start == text.npos ? 0 : start + 2)));
  }

 private:
  enum class Place { kOutside, kTop, kMetadata, kTensor, kArray };

  template <typename... Args>
  bool fail(fmt::format_string<Args...> format, Args&&... args) {
    error_ = fmt::format(format, std::forward<Args>(args)...);
    return false;
  }

  std::string where() const { return fmt::format("tensor \"{}\": {}", printable(current_.name), key_); }

  // A value where something else must be; the places that take it have dealt with it before.
  bool scalar(const std::string& value) {
    switch (place_) {
      case Place::kTop: return fail("\"{}\": must be an object, not {}", printable(key_), value);
      case Place::kMetadata: return fail("__metadata__: \"{}\": must be a string, not {}", printable(key_), value);
      case Place::kTensor:
        return fail("{}: must be {}, not {}", where(), key_ == "dtype" ? "a string" : "an array of integers", value);
      case Place::kArray: return fail("{}: must hold non-negative 64-bit integers, not {}", where(), value);
      case Place::kOutside: break;
    }
    return fail("the header must be one JSON object");
  }

  SafetensorsHeader& header_;
  Place place_ = Place::kOutside;
  std::string key_, error_;
  std::set<std::string, std::less<>> names_, fields_;
  HeaderTensor current_;
  std::vector<std::uint64_t> offsets_;
};

void check_tensor(const HeaderTensor& tensor, std::uint64_t data_bytes, const std::string& path) {
  const std::string where = fmt::format("{}: tensor \"{}\"", path, printable(tensor.name));
  if (tensor.begin > tensor.end) {
    throw SafetensorsError(
        fmt::format("{}: data_offsets [{}, {}]: begin lies behind end", where, tensor.begin, tensor.end));
  }
  if (tensor.end > data_bytes) {
    throw SafetensorsError(fmt::format(
        "{}: data_offsets [{}, {}]: beyond the file's {} bytes of data; if the file was cut short, at least "
        "{} bytes are missing",
        where, tensor.begin, tensor.end, data_bytes, tensor.end - data_bytes));
  }
  const std::uint64_t bytes = tensor_bytes(tensor.dtype, tensor.shape, where);
  if (bytes != tensor.end - tensor.begin) {
    throw SafetensorsError(fmt::format("{}: data_offsets [{}, {}]: {} bytes, but {} {} takes {}", where, tensor.begin,
                                       tensor.end, tensor.end - tensor.begin, dtype_name(tensor.dtype),
                                       shape_text(tensor.shape), bytes));
  }
}

// The tensors, sorted by offset, must follow each other without a hole up to the end of the file.
void check_coverage(const std::vector<HeaderTensor>& tensors, std::uint64_t data_bytes, const std::string& path) {
  std::uint64_t covered = 0;
  for (const HeaderTensor& tensor : tensors) {
    if (tensor.begin != covered) {
      throw SafetensorsError(fmt::format("{}: tensor \"{}\": data_offsets [{}, {}]: {} at byte {}", path,
                                         printable(tensor.name), tensor.begin, tensor.end,
                                         tensor.begin < covered ? "overlaps the tensor before, which ends"
                                                                : "leaves a hole behind the tensor before, which ends",
                                         covered));
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    throw SafetensorsError(
        fmt::format("{}: its tensors take {} bytes, but {} bytes follow the header", path, covered, data_bytes));
  }
}

}  // namespace

SafetensorsHeader read_safetensors_header(std::string_view json, std::uint64_t data_bytes, const std::string& path) {
  if (json.empty() || json.front() != '{') {
    throw SafetensorsError(path + ": the header must begin with '{'; this is not a safetensors file");
  }
  // The JSON library takes a NUL for the end of its input and would not look at what lies behind.
  if (const std::size_t nul = json.find('\0'); nul != json.npos) {
    throw SafetensorsError(fmt::format("{}: the header is not valid JSON: NUL at byte {}", path, nul));
  }
  SafetensorsHeader header;
  HeaderReader reader(header);
  if (!Json::sax_parse(json.begin(), json.end(), &reader)) throw SafetensorsError(path + ": " + reader.error());
  for (const HeaderTensor& tensor : header.tensors) check_tensor(tensor, data_bytes, path);
  std::sort(header.tensors.begin(), header.tensors.end(), [](const HeaderTensor& left, const HeaderTensor& right) {
    return std::tie(left.begin, left.end, left.name) < std::tie(right.begin, right.end, right.name);
  });
  check_coverage(header.tensors, data_bytes, path);
  return header;
}

std::uint64_t tensor_bytes(Dtype dtype, const std::vector<std::int64_t>& shape, const std::string& where) {
  // A zero among the extents must not excuse a product of the others that no stride could express.
  bool empty = false;
  std::uint64_t bits = static_cast<std::uint64_t>(dtype_bits(dtype));
  for (const std::int64_t extent : shape) {
    empty |= extent == 0;
    if (extent != 0 && bits > kMaxBytes / static_cast<std::uint64_t>(extent)) {
      throw SafetensorsError(fmt::format("{}: shape {}: the size overflows", where, shape_text(shape)));
    }
    if (extent != 0) bits *= static_cast<std::uint64_t>(extent);
  }
  if (empty) return 0;
  if (bits % 8 != 0) {
    throw SafetensorsError(
        fmt::format("{}: shape {} of {}: not a whole number of bytes", where, shape_text(shape), dtype_name(dtype)));
  }
  return bits / 8;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t kMaxExtentsShown = 8;
  const auto end = shape.begin() + static_cast<std::ptrdiff_t>(std::min(shape.size(), kMaxExtentsShown));
  return fmt::format("[{}{}]", fmt::join(shape.begin(), end, ", "), shape.size() > kMaxExtentsShown ? ", ..." : "");
}

}  // namespace chiasma::cli
