// The same inputs give the same bits: over ten thousand runs, whatever the scratch memory held before, and in
// batch-invariant mode whatever else is in the batch and however many multiprocessors take part.
#include "gpu_fixture.h"

namespace chiasma::harness {
namespace {

class GpuRepeat : public GpuKernelTest {};

const std::vector<std::string> kShapes = {
    "decode b=1 h=16 pool=3000 scale=amax",
    "decode b=1 pool=3000 topk=2051 scale=amax valid=0.9 garbage=1",
    "decode b=2 h=64 sq=2 pool=3000 topk=1999 scale=amax valid=0.9 splits=5",
    "decode b=7 sq=2 pool=3000 topk=1000 scale=amax valid=0.9 len=random sink=random",
    "decode b=40 h=8 pool=500 topk=301 scale=amax valid=0.8 garbage=1 invariant=1",
    "decode b=133 pool=500 topk=257 scale=amax",
    // One of every other format.
    "decode b=3 sq=2 pool=3000 topk=1000 fmt=v4 valid=0.9 len=random xpool=2000 xtopk=513 xpage=2 sink=random",
    "decode b=3 pool=3000 topk=1999 fmt=v41 valid=0.9 xpool=500 xtopk=65",
    "decode b=5 h=64 pool=3000 topk=1000 fmt=v41plane valid=0.9 splits=3",
    "decode b=2 h=16 sq=2 pool=3000 topk=2051 fmt=v32nope scale=amax valid=0.9",
    "decode b=30 pool=900 topk=700 fmt=v32nope_compact scale=amax len=rows",
    "decode b=7 sq=2 pool=3000 topk=1000 fmt=fp8 valid=0.9 q=pair",
    "decode b=1 h=32 pool=3000 topk=2048 fmt=fp8nope",
    "decode b=7 sq=2 pool=3000 topk=1000 fmt=bf16 valid=0.9 len=random sink=random",
    "decode b=2 h=64 pool=3000 topk=2048 fmt=bf16nope splits=3",
};

TEST_P(GpuRepeat, TenThousandRunsGiveTheSameBits) {
  constexpr int kRuns = 10'000;
  for (const auto& prepared : prepare_all(kShapes)) {
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    RunError error;
    for (int run = 0; run < kRuns; ++run) ASSERT_TRUE(prepared->queue_compared_run(&error)) << error.message;
    expect_no_differences(*prepared->queue, to_line(prepared->workload->spec()));
  }
}

TEST_P(GpuRepeat, ScratchContentsDoNotMatter) {
  for (const auto& prepared : prepare_all(kShapes)) {
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    for (const int value : {0x00, 0xff, 0x7f, 0x01}) {
      RunError error;
      prepared->queue->fill(prepared->runner->workspace(), value, prepared->runner->workspace_bytes());
      ASSERT_TRUE(prepared->queue_compared_run(&error)) << error.message;
      expect_no_differences(*prepared->queue, to_line(prepared->workload->spec()));
    }
  }
}

// Requests [begin, begin + count) of a call, its other tensors being packed.
chiasma_decode_args batch_slice(chiasma_decode_args args, std::int64_t begin, std::int64_t count) {
  const auto cut = [&](chiasma_tensor& tensor, std::int64_t element_bytes) {
    if (tensor.rank == 0) return;
    tensor.data = static_cast<std::byte*>(tensor.data) + begin * tensor.stride[0] * element_bytes;
    tensor.shape[0] = count;
  };
  cut(args.q, 2);
  cut(args.indices, 4);
  cut(args.topk_length, 4);
  cut(args.out, 2);
  cut(args.lse, 4);
  return args;
}

struct Slice {
  std::int64_t begin, count;
  std::int32_t compute_units = 0;  // to plan for; 0: the device's own
};

class GpuBatchInvariance : public GpuKernelTest {
 protected:
  // Runs some requests of a batch alone and compares with what the whole batch gave.
  void compare(Prepared& prepared, const Slice& slice) {
    const chiasma_decode_args args = batch_slice(prepared.runner->args(), slice.begin, slice.count);
    chiasma_device_info info = {};
    ASSERT_EQ(chiasma_device_query(/*number=*/1, &info), CHIASMA_OK) << chiasma_last_error();
    if (slice.compute_units > 0) info.compute_units = slice.compute_units;
    const std::string kernel = prepared.runner->kernel();
    chiasma_plan_options options = {};
    options.kernel = kernel.c_str();
    options.batch_invariant = 1;
    options.num_splits = static_cast<int>(prepared.workload->spec().splits);
    options.device_info = &info;
    chiasma_decode_plan* plan = nullptr;
    ASSERT_EQ(chiasma_decode_plan_create(&args, &options, &plan), CHIASMA_OK) << chiasma_last_error();
    const std::size_t bytes = chiasma_decode_plan_workspace_bytes(plan);
    const GuardedBlock workspace(*device_, bytes);
    prepared.queue_poisoned_outputs();
    EXPECT_EQ(chiasma_decode_run(plan, &args, workspace.data(), bytes, prepared.queue->stream()), CHIASMA_OK)
        << chiasma_last_error();
    count_slice_differences(prepared, args);
    chiasma_decode_plan_destroy(plan);
    std::string message;
    EXPECT_TRUE(prepared.queue->synchronize(&message)) << message;
    EXPECT_TRUE(workspace.guards_intact()) << "a write outside the scratch memory";
    expect_no_differences(*prepared.queue, to_line(prepared.workload->spec()) + ": requests " +
                                               std::to_string(slice.begin) + " to " +
                                               std::to_string(slice.begin + slice.count - 1) + " alone");
  }

 private:
  static void count_slice_differences(Prepared& prepared, const chiasma_decode_args& args) {
    std::size_t output = 0;
    const std::vector<Region>& regions = prepared.workload->regions();
    for (std::size_t n = 0; n < regions.size(); ++n) {
      if (!regions[n].is_output) continue;
      const chiasma_tensor& tensor = args.*regions[n].tensor;
      const std::size_t element_bytes = tensor.dtype == CHIASMA_BFLOAT16 ? 2 : 4;
      const auto* begin = static_cast<const std::byte*>(tensor.data);
      const std::ptrdiff_t offset = begin - prepared.runner->blocks()[n].get();
      prepared.queue->count_differences(begin, prepared.reference[output].get() + offset,
                                        static_cast<std::size_t>(tensor.shape[0] * tensor.stride[0]) * element_bytes);
      ++output;
    }
  }
};

TEST_P(GpuBatchInvariance, CompanionsAndPlaceChangeNoBit) {
  const std::vector<std::string> lines = {
      "decode b=263 h=16 pool=90 topk=700 scale=amax valid=0.9 len=random sink=random invariant=1",
      "decode b=263 sq=2 pool=90 topk=130 scale=amax valid=0.9 garbage=1 invariant=1",
      "decode b=263 h=64 pool=90 topk=2051 scale=amax len=random invariant=1 splits=3",
  };
  for (const auto& prepared : prepare_all(lines)) {
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    for (const Slice slice : {Slice{0, 1},
                              {17, 1},
                              {262, 1},
                              {0, 31},
                              {200, 31},
                              {0, 131},
                              {131, 131},
                              {7, 132},
                              {131, 132},
                              {0, 133},
                              {130, 133},
                              {0, 263}}) {
      ASSERT_NO_FATAL_FAILURE(compare(*prepared, slice));
    }
    for (const int units : {7, 66, 131}) {
      ASSERT_NO_FATAL_FAILURE(compare(*prepared, {.begin = 0, .count = 263, .compute_units = units}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuRepeat, testing::ValuesIn(cuda_kernels()), name_of_kernel);
INSTANTIATE_TEST_SUITE_P(All, GpuBatchInvariance, testing::ValuesIn(cuda_kernels()), name_of_kernel);

}  // namespace
}  // namespace chiasma::harness
