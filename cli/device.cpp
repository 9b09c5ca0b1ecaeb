#include "cli/device.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "cli/error.h"
#include "format/kv_format.h"

namespace chiasma::cli {
namespace {

chiasma_device_kind kind_of_kernel(const std::string& kernel) {
  std::string known;
  for (std::int32_t number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info{};
    check_status(chiasma_kernel_query(number, &info), "kernel");
    if (kernel == info.name) return info.device_kind;
    known += (known.empty() ? "" : ", ") + std::string(info.name);
  }
  fail_input("--kernel {}: there is no such kernel; this build has: {}", kernel, known);
}

std::size_t contiguous_bytes(const chiasma_tensor& tensor) {
  std::size_t bytes = tensor.dtype == CHIASMA_FLOAT32 || tensor.dtype == CHIASMA_INT32 ? 4 : 2;
  for (std::int32_t axis = 0; axis < tensor.rank; ++axis) bytes *= static_cast<std::size_t>(tensor.shape[axis]);
  return bytes;
}

// Of copies to a device.
constexpr std::size_t kPieceBytes = std::size_t{64} << 20;

// A quantised cache, whose pages may lie at any distance on the CPU. Pages of bf16 are multiples of 16 bytes.
bool is_paged(const chiasma_tensor& tensor) {
  return tensor.dtype == CHIASMA_UINT8 && tensor.rank >= 3 && tensor.shape[0] > 1;
}

}  // namespace

std::unique_ptr<harness::Device> open_device(const std::string& device, const std::string& kernel) {
  if (!harness::is_device_name(device)) fail_input("--device {}: must be {}", device, kDeviceHelp);
  std::string name = device;
  if (!kernel.empty()) {
    const chiasma_device_kind kind = kind_of_kernel(kernel);
    if (device == "auto") name = kind == CHIASMA_CPU ? "cpu" : "cuda";
  }
  std::string error;
  std::unique_ptr<harness::Device> opened = harness::open_device(name, &error);
  if (opened == nullptr) throw CommandError(kExitUnavailable, fmt::format("--device {}: {}", device, error));
  return opened;
}

std::byte* DeviceTensors::scratch(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  blocks_.push_back(device_.allocate(bytes));
  if (blocks_.back() == nullptr) throw std::bad_alloc();
  return blocks_.back().get();
}

chiasma_tensor DeviceTensors::shape_of(const chiasma_tensor& host) const {
  chiasma_tensor placed = host;
  placed.device = device_.id();
  if (!device_.shares_host_memory() && is_paged(host)) {
    placed.stride[0] = (host.stride[0] + kCacheAlignment - 1) / kCacheAlignment * kCacheAlignment;
  }
  return placed;
}

chiasma_tensor DeviceTensors::input(const chiasma_tensor& host, std::size_t bytes, const Release& release) {
  if (device_.shares_host_memory() || host.rank == 0) return host;
  chiasma_tensor placed = shape_of(host);
  const std::span<const std::byte> from(static_cast<const std::byte*>(host.data), bytes);
  if (is_paged(host) && placed.stride[0] != host.stride[0]) {
    const auto stride = static_cast<std::size_t>(placed.stride[0]);
    placed.data = scratch(static_cast<std::size_t>(host.shape[0]) * stride);
    copy_pages(static_cast<std::byte*>(placed.data), stride, from, static_cast<std::size_t>(host.stride[0]), release);
    return placed;
  }
  placed.data = scratch(bytes);
  for (std::size_t begin = 0; begin < bytes; begin += kPieceBytes) {
    const auto piece = from.subspan(begin, std::min(kPieceBytes, bytes - begin));
    copy(static_cast<std::byte*>(placed.data) + begin, piece);
    release(piece);
  }
  return placed;
}

void DeviceTensors::copy(std::byte* to, std::span<const std::byte> from) {
  if (device_.copy_to_device(to, from.data(), from.size())) return;
  throw CommandError(kExitUnavailable, fmt::format("copying {} bytes to the device failed", from.size()));
}

// Some pages at a time are put `stride` bytes apart, then copied together.
void DeviceTensors::copy_pages(std::byte* to, std::size_t stride, std::span<const std::byte> from,
                               std::size_t from_stride, const Release& release) {
  const std::size_t pages_at_once = std::max<std::size_t>(1, kPieceBytes / stride);
  std::vector<std::byte> piece(pages_at_once * stride);
  const std::size_t num_pages = from.size() / from_stride;
  for (std::size_t first = 0; first < num_pages; first += pages_at_once) {
    const std::size_t count = std::min(pages_at_once, num_pages - first);
    const auto pages = from.subspan(first * from_stride, count * from_stride);
    for (std::size_t page = 0; page < count; ++page) {
      std::memcpy(piece.data() + page * stride, pages.data() + page * from_stride, from_stride);
    }
    copy(to + first * stride, std::span(piece).first(count * stride));
    release(pages);
  }
}

chiasma_tensor DeviceTensors::output(chiasma_dtype dtype, std::initializer_list<std::int64_t> shape) {
  chiasma_tensor tensor =
      chiasma_contiguous(nullptr, dtype, device_.id(), static_cast<std::int32_t>(shape.size()), shape.begin());
  tensor.data = scratch(contiguous_bytes(tensor));
  return tensor;
}

std::span<const std::byte> DeviceTensors::fetch(const chiasma_tensor& output) {
  std::string error;
  if (!device_.synchronize(&error)) throw CommandError(kExitUnavailable, error);
  const std::size_t bytes = contiguous_bytes(output);
  const auto* data = static_cast<const std::byte*>(output.data);
  if (device_.shares_host_memory() || bytes == 0) return {data, bytes};
  fetched_.emplace_back(bytes);
  if (!device_.copy_to_host(fetched_.back().data(), data, bytes)) {
    throw CommandError(kExitUnavailable, fmt::format("copying {} bytes from the device failed", bytes));
  }
  return fetched_.back();
}

}  // namespace chiasma::cli
