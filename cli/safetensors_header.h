// The JSON header of a safetensors file, read strictly. Used by cli/safetensors.cpp only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/safetensors.h"

namespace chiasma::cli {

inline constexpr const char* kMetadataKey = "__metadata__";

struct HeaderTensor {
  std::string name;
  Dtype dtype{};
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // data_offsets: bytes from the end of the header
};

struct SafetensorsHeader {
  std::vector<HeaderTensor> tensors;  // ordered by their data, which covers [0, data_bytes) exactly
  SafetensorsMetadata metadata;
};

// Throws SafetensorsError with `path` in front of what is wrong. `data_bytes`: size of the file behind the header.
SafetensorsHeader read_safetensors_header(std::string_view json, std::uint64_t data_bytes, const std::string& path);

// Bytes of a tensor. Throws SafetensorsError if their number overflows or is no whole number.
std::uint64_t tensor_bytes(Dtype dtype, const std::vector<std::int64_t>& shape, const std::string& where);

// "[2, 3]"; long ones are cut.
std::string shape_text(const std::vector<std::int64_t>& shape);

// "BF16" and so on; throws SafetensorsError naming `where`.
Dtype parse_dtype(std::string_view name, const std::string& where);

}  // namespace chiasma::cli
