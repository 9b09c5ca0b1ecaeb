// CUDA graphs: recorded once, replayed over other contents at the same addresses, equal to eager runs bit by bit.
#include <limits>
#include <utility>

#include "gpu_fixture.h"
#include "harness/check.h"

namespace chiasma::harness {
namespace {

class GpuGraph : public GpuKernelTest {
 protected:
  std::unique_ptr<Recording> record(Prepared& prepared) {
    RunError run_error;
    std::string error;
    std::unique_ptr<Recording> recording =
        prepared.queue->record([&] { return prepared.runner->launch(&run_error); }, &error);
    EXPECT_NE(recording, nullptr) << error << " " << run_error.message;
    return recording;
  }
};

const std::vector<std::string> kShapes = {
    "decode b=6 pool=3000 scale=amax valid=0.9 len=random sink=random",
    "decode b=12 h=16 sq=2 pool=900 topk=700 scale=amax valid=0.8 garbage=1 len=random",
    "decode b=140 h=16 pool=300 topk=257 scale=amax len=random invariant=1",
    "decode b=5 h=16 pool=900 topk=300 fmt=v41 valid=0.8 garbage=1 len=random xpool=500 xtopk=65",
};

std::int32_t* index_row(const chiasma_decode_args& args, std::int64_t request, std::int64_t token) {
  return static_cast<std::int32_t*>(args.indices.data) + request * args.indices.stride[0] +
         token * args.indices.stride[1];
}

// What a server leaves in the rows of a batch that is smaller than its graph: -1, garbage, or the indices of earlier
// steps, with a length of 0 or without.
void pad_rows(const chiasma_decode_args& args) {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::int64_t last = args.q.shape[0] - 1;
  auto* lengths = static_cast<std::int32_t*>(args.topk_length.data);
  const std::int64_t length_stride = args.topk_length.stride[0];
  for (std::int64_t token = 0; token < args.q.shape[1]; ++token) {
    for (std::int64_t entry = 0; entry < args.indices.shape[2]; ++entry) {
      index_row(args, last, token)[entry] = -1;
      index_row(args, last - 1, token)[entry] = entry % 2 == 0 ? kMost - static_cast<std::int32_t>(entry) : -kMost;
    }
  }
  lengths[last * length_stride] = lengths[(last - 1) * length_stride] = kMost;
  lengths[(last - 2) * length_stride] = 0;
}

std::vector<std::unique_ptr<Workload>> other_contents(const Case& original) {
  std::vector<std::unique_ptr<Workload>> contents;
  for (const std::uint64_t seed : {11, 12, 13, 14}) {
    Case spec = original;
    spec.seed = seed;
    spec.len = seed == 13 ? LengthMode::kZero : seed == 14 ? LengthMode::kFull : LengthMode::kRandom;
    std::string message;
    contents.push_back(Workload::make(spec, &message));
    EXPECT_NE(contents.back(), nullptr) << message;
    if (seed % 2 == 0) pad_rows(contents.back()->args());
  }
  return contents;
}

TEST_P(GpuGraph, ReplaysWithOtherContentsEqualEagerRuns) {
  for (const auto& prepared : prepare_all(kShapes)) {
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    const std::unique_ptr<Recording> recording = record(*prepared);
    ASSERT_NE(recording, nullptr);
    for (const std::unique_ptr<Workload>& workload : other_contents(prepared->workload->spec())) {
      RunError error;
      ASSERT_TRUE(prepared->runner->exchange(*workload, &error)) << error.message;
      prepared->queue_poisoned_outputs();
      ASSERT_TRUE(prepared->runner->launch(&error)) << error.message;
      prepared->keep_reference(*device_);
      prepared->queue_poisoned_outputs();
      prepared->queue->replay(*recording);
      prepared->queue_comparison();
      expect_no_differences(*prepared->queue, to_line(workload->spec()));
      ASSERT_TRUE(prepared->runner->fetch(&error)) << error.message;
      const CheckReport report = check_decode(workload->args(), tolerance_of(CHIASMA_CUDA, workload->spec()));
      EXPECT_TRUE(report.passed) << to_line(workload->spec()) << "\n" << report.failure;
    }
  }
}

// Two contents in turn, so that a replay that does nothing is seen.
TEST_P(GpuGraph, TenThousandReplays) {
  constexpr int kReplays = 10'000;
  const std::vector<std::string> lines = {"decode b=2 h=16 pool=600 topk=400 scale=amax len=full",
                                          "decode b=1 pool=3000 scale=amax valid=0.9"};
  for (const auto& prepared : prepare_all(lines)) {
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    std::size_t indices = 0;
    while (prepared->workload->regions()[indices].tensor != &chiasma_decode_args::indices) ++indices;
    const std::size_t bytes = prepared->workload->regions()[indices].bytes();
    std::byte* place = prepared->runner->blocks()[indices].get();
    // Those of the case, and every entry the same slot.
    const DeviceBlock contents[2] = {device_->allocate(bytes), device_->allocate(bytes)};
    prepared->queue->copy(contents[0].get(), place, bytes);
    prepared->queue->fill(contents[1].get(), 0, bytes);
    const std::unique_ptr<Recording> recording = record(*prepared);
    ASSERT_NE(recording, nullptr);
    std::vector<DeviceBlock> references[2];
    for (const int which : {0, 1}) {
      RunError error;
      prepared->queue->copy(place, contents[which].get(), bytes);
      prepared->queue_poisoned_outputs();
      ASSERT_TRUE(prepared->runner->launch(&error)) << error.message;
      prepared->keep_reference(*device_);
      references[which] = prepared->reference;
    }
    for (int replay = 0; replay < kReplays; ++replay) {
      prepared->queue->copy(place, contents[replay % 2].get(), bytes);
      prepared->queue->replay(*recording);
      // Guard zones of both are as the poisoning left them.
      std::swap(prepared->reference, references[replay % 2]);
      prepared->queue_comparison();
      std::swap(prepared->reference, references[replay % 2]);
    }
    expect_no_differences(*prepared->queue, to_line(prepared->workload->spec()));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuGraph, testing::ValuesIn(cuda_kernels()), name_of_kernel);

}  // namespace
}  // namespace chiasma::harness
