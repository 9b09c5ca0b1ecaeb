// Any bytes are either refused with a message or read as tensors that lie inside the bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "cli/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace chiasma::cli;
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  try {
    const SafetensorsFile file = SafetensorsFile::parse(bytes, "fuzz");
    std::size_t total = 0;
    for (const SafetensorsTensor& tensor : file.tensors()) {
      const bool inside =
          tensor.data.data() >= bytes.data() && tensor.data.data() + tensor.data.size() <= bytes.data() + bytes.size();
      if (!inside || file.find(tensor.name) != &tensor || describe(tensor).empty()) std::abort();
      total += tensor.data.size();
    }
    if (total > size) std::abort();
  } catch (const SafetensorsError& error) {
    if (error.what()[0] == '\0') std::abort();
  }
  return 0;
}
