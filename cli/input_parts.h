// What the readers of input files share: tensors and metadata by name, and their numbers.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "chiasma/chiasma.h"
#include "cli/safetensors.h"

namespace chiasma::cli {

// Throws CommandError, with what the file has instead.
const SafetensorsTensor& require(const SafetensorsFile& file, const std::string& name);
// Null: not there.
const std::string* find_metadata(const SafetensorsFile& file, const std::string& key);

// A tensor of a file as it lies there, for the C interface. Throws CommandError where no argument has such a rank.
chiasma_tensor cpu_tensor(const SafetensorsFile& file, const SafetensorsTensor& tensor, chiasma_dtype dtype);

template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}
// With blanks around it and a plus, as people write numbers.
std::optional<double> parse_loosely(std::string_view text);

// IEEE binary16, which F16 is.
float half_to_float(std::uint16_t half);

// The number that a tensor of one F32 or F64 holds. Throws CommandError.
double number_of(const SafetensorsFile& file, const SafetensorsTensor& tensor);

}  // namespace chiasma::cli
