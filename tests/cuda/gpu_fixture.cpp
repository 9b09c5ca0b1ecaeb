#include "gpu_fixture.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "harness/check.h"

namespace chiasma::harness {
namespace {

constexpr int kNanByte = 0xff;
constexpr std::size_t kGuardBytes = std::size_t{1} << 20;
constexpr int kGuardByte = 0xc5;
// Some ten milliseconds on the cores of a GPU server; longer cases are sampled.
constexpr double kCheckMultiplyAdds = 5e8;

}  // namespace

std::vector<std::string> cuda_kernels() {
  std::vector<std::string> names;
  for (int number = 0; number < chiasma_kernel_count(); ++number) {
    chiasma_kernel_info info;
    if (chiasma_kernel_query(number, &info) == CHIASMA_OK && info.device_kind == CHIASMA_CUDA)
      names.push_back(info.name);
  }
  return names.empty() ? std::vector<std::string>{"none"} : names;
}

std::string name_of_kernel(const testing::TestParamInfo<std::string>& info) {
  return info.param;
}

std::vector<std::byte> output_bytes(const Workload& workload) {
  std::vector<std::byte> bytes;
  for (const Region& region : workload.regions()) {
    if (region.is_output) bytes.insert(bytes.end(), region.base(), region.base() + region.bytes());
  }
  return bytes;
}

void Prepared::keep_reference(Device& device) {
  reference.clear();
  const std::vector<Region>& regions = workload->regions();
  for (std::size_t n = 0; n < regions.size(); ++n) {
    if (!regions[n].is_output) continue;
    reference.push_back(device.allocate(regions[n].bytes()));
    ASSERT_NE(reference.back(), nullptr) << "no device memory";
    queue->copy(reference.back().get(), runner->blocks()[n].get(), regions[n].bytes());
  }
}

void Prepared::queue_poisoned_outputs() {
  const std::vector<Region>& regions = workload->regions();
  for (std::size_t n = 0; n < regions.size(); ++n) {
    if (regions[n].is_output) queue->fill(runner->blocks()[n].get(), kNanByte, regions[n].bytes());
  }
}

void Prepared::queue_comparison() {
  std::size_t output = 0;
  const std::vector<Region>& regions = workload->regions();
  for (std::size_t n = 0; n < regions.size(); ++n) {
    if (!regions[n].is_output) continue;
    queue->count_differences(runner->blocks()[n].get(), reference[output].get(), regions[n].bytes());
    ++output;
  }
}

bool Prepared::queue_compared_run(RunError* error) {
  queue_poisoned_outputs();
  if (!runner->launch(error)) return false;
  queue_comparison();
  return true;
}

GuardedBlock::GuardedBlock(Device& device, std::size_t bytes) : device_(&device), bytes_(bytes) {
  const std::size_t total = kGuardBytes + bytes + kGuardBytes;
  block_ = device.allocate(total);
  if (block_ != nullptr && !device.fill(block_.get(), kGuardByte, total)) block_ = nullptr;
}

std::byte* GuardedBlock::data() const {
  return block_ == nullptr ? nullptr : block_.get() + kGuardBytes;
}

bool GuardedBlock::guards_intact() const {
  std::vector<std::byte> guard(kGuardBytes);
  for (const std::byte* place : {block_.get(), block_.get() + kGuardBytes + bytes_}) {
    if (!device_->copy_to_host(guard.data(), place, kGuardBytes)) return false;
    if (std::any_of(guard.begin(), guard.end(), [](std::byte byte) { return byte != std::byte{kGuardByte}; }))
      return false;
  }
  return true;
}

void GpuTest::SetUp() {
  if (chiasma_cuda_available() != CHIASMA_OK) GTEST_SKIP() << "NOT RUN: " << chiasma_last_error();
  std::string error;
  device_ = open_device("cuda", &error);
  ASSERT_NE(device_, nullptr) << error;
}

std::unique_ptr<Prepared> GpuTest::prepare(const std::string& line, const std::string& kernel) {
  Case spec;
  std::string message;
  auto prepared = std::make_unique<Prepared>();
  // Lines that say nothing of a format are for every kernel.
  const bool needs_bf16 = kernel == "sm90_sparse_bf16" && line.find("fmt=") == std::string::npos;
  const std::string own_line = needs_bf16 ? line + " fmt=bf16" : line;
  if (parse_case(own_line, &spec, &message)) prepared->workload = Workload::make(spec, &message);
  if (prepared->workload == nullptr) {
    ADD_FAILURE() << line << ": " << message;
    return nullptr;
  }
  prepared->queue = device_->open_queue();
  RunError error;
  RunOptions options;
  options.kernel = kernel;
  options.queue = prepared->queue.get();
  prepared->runner = Runner::make(*prepared->workload, *device_, options, &error);
  if (prepared->runner != nullptr) return prepared;
  if (error.status != CHIASMA_UNSUPPORTED) {
    ADD_FAILURE() << line << ": " << error.message;
  } else {
    std::printf("NOT DONE by %s: %s: %s\n", kernel.c_str(), line.c_str(), error.message.c_str());
  }
  return nullptr;
}

void GpuTest::run_reference(Prepared& prepared) {
  RunError error;
  const Case& spec = prepared.workload->spec();
  ASSERT_TRUE(prepared.runner->launch(&error)) << to_line(spec) << "\n" << error.message;
  ASSERT_TRUE(prepared.runner->fetch(&error)) << to_line(spec) << "\n" << error.message;
  const CheckReport report = check(*prepared.workload, tolerance_of(CHIASMA_CUDA, spec),
                                   {.max_multiply_adds = kCheckMultiplyAdds, .rows = {}});
  ASSERT_TRUE(report.passed) << to_line(spec) << "\n" << report.failure;
  // Once more, with guard zones that look as those of all later runs.
  prepared.queue_poisoned_outputs();
  ASSERT_TRUE(prepared.runner->launch(&error)) << to_line(spec) << "\n" << error.message;
  prepared.keep_reference(*device_);
}

void GpuTest::expect_no_differences(Queue& queue, const std::string& what) {
  std::string error;
  EXPECT_EQ(queue.take_differences(&error), 0) << what << ": words that differ (-1: " << error << ")";
}

std::vector<std::unique_ptr<Prepared>> GpuKernelTest::prepare_all(const std::vector<std::string>& lines) {
  std::vector<std::unique_ptr<Prepared>> all;
  for (const std::string& line : lines) {
    if (std::unique_ptr<Prepared> prepared = prepare(line, GetParam())) all.push_back(std::move(prepared));
  }
  EXPECT_FALSE(all.empty()) << "the kernel did none of the cases";
  return all;
}

}  // namespace chiasma::harness
