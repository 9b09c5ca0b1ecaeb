// What goes to a device that does not share the host's memory: in pieces, pages at distances that a device takes, and
// nothing is kept on the host longer than it is needed.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "chiasma/chiasma.hpp"
#include "cli/device.h"

namespace chiasma::cli {
namespace {

// Memory "of a device" that the test can look into.
class FarDevice final : public harness::Device {
 public:
  chiasma_device id() const override { return {CHIASMA_CUDA, 3}; }
  std::vector<std::pair<std::string, std::string>> describe() const override { return {}; }
  bool shares_host_memory() const override { return false; }
  harness::DeviceBlock allocate(std::size_t bytes) override {
    return {static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256)), std::free};
  }
  bool fill(std::byte* device, int value, std::size_t bytes) override {
    std::memset(device, value, bytes);
    return true;
  }
  bool copy_to_device(std::byte* device, const std::byte* host, std::size_t bytes) override {
    ++copies;
    std::memcpy(device, host, bytes);
    return true;
  }
  bool copy_to_host(std::byte* host, const std::byte* device, std::size_t bytes) override {
    std::memcpy(host, device, bytes);
    return true;
  }
  bool synchronize(std::string* /*error*/) override { return true; }
  void flush_caches() override {}
  double time_us(const std::function<void()>& work) override {
    work();
    return 0;
  }

  int copies = 0;
};

std::vector<std::byte> counted_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 251);
  return bytes;
}

TEST(DeviceTensors, LargeTensorsGoInPiecesFromAnyAddress) {
  FarDevice device;
  DeviceTensors tensors(device);
  const std::size_t bytes = (std::size_t{130} << 20) / 656 * 656;
  const std::vector<std::byte> storage = counted_bytes(bytes + 5);
  const auto slots = static_cast<std::int64_t>(bytes / 656);
  const chiasma_tensor host = tensor(storage.data() + 5, CHIASMA_UINT8, kCpu, {slots, 1, 656});
  std::size_t released = 0;
  const std::byte* next = storage.data() + 5;
  const chiasma_tensor placed = tensors.input(host, bytes, [&](std::span<const std::byte> part) {
    EXPECT_EQ(part.data(), next);
    EXPECT_EQ(device.copies, static_cast<int>(released >> 26) + 1) << "copied before it is let go";
    next += part.size();
    released += part.size();
  });
  EXPECT_EQ(device.copies, 3);
  EXPECT_EQ(released, bytes);
  EXPECT_EQ(placed.device.index, 3);
  EXPECT_EQ(placed.stride[0], 656);
  EXPECT_EQ(std::memcmp(placed.data, storage.data() + 5, bytes), 0);
}

TEST(DeviceTensors, PagesAreMovedToMultiplesOf16) {
  for (const std::int64_t page_bytes : {2920, 2923, 2928}) {
    for (const std::int64_t pages : {1, 3, 60000}) {
      FarDevice device;
      DeviceTensors tensors(device);
      const auto bytes = static_cast<std::size_t>(pages * page_bytes);
      const std::vector<std::byte> storage = counted_bytes(bytes);
      chiasma_tensor host = tensor(storage.data(), CHIASMA_UINT8, kCpu, {pages, 5, 584});
      host.stride[0] = page_bytes;
      std::size_t released = 0;
      const chiasma_tensor placed =
          tensors.input(host, bytes, [&](std::span<const std::byte> part) { released += part.size(); });
      EXPECT_EQ(released, bytes);
      if (pages > 1) {
        EXPECT_EQ(placed.stride[0], 2928);
        EXPECT_EQ(placed.stride[0], tensors.shape_of(host).stride[0]) << "what is planned for";
      }
      for (std::int64_t page = 0; page < pages; ++page) {
        ASSERT_EQ(std::memcmp(static_cast<const std::byte*>(placed.data) + page * placed.stride[0],
                              storage.data() + page * page_bytes, static_cast<std::size_t>(page_bytes)),
                  0)
            << page;
      }
    }
  }
}

TEST(DeviceTensors, OnTheCpuTensorsStayWhereTheyAre) {
  const std::unique_ptr<harness::Device> cpu = harness::open_cpu_device();
  DeviceTensors tensors(*cpu);
  const std::vector<std::byte> storage = counted_bytes(2 * 2923 + 1);
  chiasma_tensor host = tensor(storage.data() + 1, CHIASMA_UINT8, kCpu, {2, 5, 584});
  host.stride[0] = 2923;
  const chiasma_tensor placed =
      tensors.input(host, 2 * 2923, [](std::span<const std::byte>) { FAIL() << "still needed"; });
  EXPECT_EQ(placed.data, storage.data() + 1);
  EXPECT_EQ(placed.stride[0], 2923);
  EXPECT_EQ(tensors.shape_of(host).stride[0], 2923);
}

}  // namespace
}  // namespace chiasma::cli
