#include "cli/input_parts.h"

#include <bit>
#include <cstring>

#include "cli/error.h"

namespace chiasma::cli {

const SafetensorsTensor& require(const SafetensorsFile& file, const std::string& name) {
  if (const SafetensorsTensor* tensor = file.find(name)) return *tensor;
  std::string present;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    present += (present.empty() ? "" : ", ") + printable(tensor.name);
  }
  fail_input("{}: there is no tensor {}; the file has: {}", file.path(), name, present.empty() ? "none" : present);
}

const std::string* find_metadata(const SafetensorsFile& file, const std::string& key) {
  const auto found = file.metadata().find(key);
  return found == file.metadata().end() ? nullptr : &found->second;
}

chiasma_tensor cpu_tensor(const SafetensorsFile& file, const SafetensorsTensor& tensor, chiasma_dtype dtype) {
  if (tensor.shape.size() > CHIASMA_MAX_RANK) {
    fail_input("{}: {} is {}; no argument has more than {} dimensions", file.path(), tensor.name, describe(tensor),
               CHIASMA_MAX_RANK);
  }
  // A scalar would read as "absent"; no argument is one.
  if (tensor.shape.empty()) fail_input("{}: {} is {}, a scalar", file.path(), tensor.name, describe(tensor));
  return chiasma_contiguous(const_cast<std::byte*>(tensor.data.data()), dtype, chiasma_device{CHIASMA_CPU, 0},
                            static_cast<std::int32_t>(tensor.shape.size()), tensor.shape.data());
}

std::optional<double> parse_loosely(std::string_view text) {
  constexpr const char* kBlanks = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return std::nullopt;
  text = text.substr(begin, text.find_last_not_of(kBlanks) + 1 - begin);
  if (text.size() > 1 && text[0] == '+' && text[1] != '-') text.remove_prefix(1);
  return parse_number<double>(text);
}

float half_to_float(std::uint16_t half) {
  const std::uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1fu, mantissa = half & 0x3ffu;
  if (exponent == 0) return std::bit_cast<float>(sign | 0x3f800000u) * (static_cast<float>(mantissa) * 0x1p-24f);
  const std::uint32_t widened = exponent == 0x1f ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | widened << 23 | mantissa << 13);
}

double number_of(const SafetensorsFile& file, const SafetensorsTensor& tensor) {
  if (tensor.dtype == Dtype::kF32 && tensor.data.size() == sizeof(float)) {
    float value = 0;
    std::memcpy(&value, tensor.data.data(), sizeof value);
    return value;
  }
  if (tensor.dtype == Dtype::kF64 && tensor.data.size() == sizeof(double)) {
    double value = 0;
    std::memcpy(&value, tensor.data.data(), sizeof value);
    return value;
  }
  fail_input("{}: {} is {}; must be one number, F32 or F64", file.path(), tensor.name, describe(tensor));
}

}  // namespace chiasma::cli
