// Any bytes are either refused with a message or read as tensors that lie inside the bytes; and whatever tensors they
// are, `decode` refuses them with a message or decodes them.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "cli/decode_input.h"
#include "cli/decode_job.h"
#include "cli/error.h"
#include "cli/safetensors.h"
#include "harness/device.h"

namespace {

using namespace chiasma::cli;

void check_tensors(const SafetensorsFile& file, std::span<const std::byte> bytes) {
  std::size_t total = 0;
  for (const SafetensorsTensor& tensor : file.tensors()) {
    const bool inside =
        tensor.data.data() >= bytes.data() && tensor.data.data() + tensor.data.size() <= bytes.data() + bytes.size();
    if (!inside || file.find(tensor.name) != &tensor || describe(tensor).empty()) std::abort();
    total += tensor.data.size();
  }
  if (total > bytes.size()) std::abort();
}

void decode(const SafetensorsFile& file) {
  const DecodeInput input(file, {});
  const auto device = chiasma::harness::open_cpu_device();
  DecodeJob job(input.args(), input.tensors(), *device, {}, "fuzz");
  job.run();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  try {
    const SafetensorsFile file = SafetensorsFile::parse(bytes, "fuzz");
    check_tensors(file, bytes);
    decode(file);
  } catch (const SafetensorsError& error) {
    if (error.what()[0] == '\0') std::abort();
  } catch (const CommandError& error) {
    if (error.what()[0] == '\0' || error.exit_code() != kExitBadInput) std::abort();
  }
  return 0;
}
