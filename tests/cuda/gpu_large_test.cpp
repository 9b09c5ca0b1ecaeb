// Sizes at which 32 bits, launch limits or scratch memory run out: 65,536 requests or query tokens, rows of 131,072
// entries, a pool that takes most of the device's memory.
#include <algorithm>
#include <cstdio>

#include "gpu_fixture.h"
#include "harness/check.h"

namespace chiasma::harness {
namespace {

constexpr std::int64_t kTiles = 1024;
constexpr std::size_t kMaxWorkspaceBytes = std::size_t{256} << 20;
constexpr int kNanByte = 0xff;

// A tensor of kTiles times the rows of a small one.
struct LargeTensor {
  GuardedBlock block;
  std::size_t tile_bytes;

  std::byte* tile(std::int64_t number) const { return block.data() + number * tile_bytes; }
};

class GpuLarge : public GpuKernelTest {
 protected:
  // Repeats the small workload's rows along dimension `dim`: 0 requests, 1 query tokens.
  bool make_large(Prepared& prepared, int dim) {
    large_args_ = prepared.runner->args();
    inputs_.clear();
    outputs_.clear();
    const std::vector<Region>& regions = prepared.workload->regions();
    for (std::size_t n = 0; n < regions.size(); ++n) {
      if (regions[n].tensor == &chiasma_decode_args::kv_cache) continue;
      if (regions[n].tensor == &chiasma_decode_args::attn_sink) continue;
      if (!repeat(*prepared.queue, &(large_args_.*regions[n].tensor), dim, regions[n].is_output)) return false;
    }
    return true;
  }

  bool repeat(Queue& queue, chiasma_tensor* tensor, int dim, bool is_output) {
    const std::size_t element_bytes = tensor->dtype == CHIASMA_BFLOAT16 ? 2 : 4;
    std::size_t tile_bytes = element_bytes;
    for (int d = 0; d < tensor->rank; ++d) tile_bytes *= static_cast<std::size_t>(tensor->shape[d]);
    const LargeTensor large = {GuardedBlock(*device_, kTiles * tile_bytes), tile_bytes};
    if (large.block.data() == nullptr) return false;
    for (std::int64_t tile = 0; !is_output && tile < kTiles; ++tile) {
      queue.copy(large.tile(tile), static_cast<const std::byte*>(tensor->data), large.tile_bytes);
    }
    std::int64_t shape[CHIASMA_MAX_RANK];
    std::copy(tensor->shape, tensor->shape + tensor->rank, shape);
    shape[dim] *= kTiles;
    *tensor = chiasma_contiguous(large.tile(0), tensor->dtype, tensor->device, tensor->rank, shape);
    (is_output ? outputs_ : inputs_).push_back(large);
    return true;
  }

  void run_large(Prepared& prepared, bool batch_invariant) {
    chiasma_plan_options options = {};
    const std::string kernel = prepared.runner->kernel();
    options.kernel = kernel.c_str();
    options.batch_invariant = batch_invariant ? 1 : 0;
    chiasma_decode_plan* plan = nullptr;
    ASSERT_EQ(chiasma_decode_plan_create(&large_args_, &options, &plan), CHIASMA_OK) << chiasma_last_error();
    const std::size_t bytes = chiasma_decode_plan_workspace_bytes(plan);
    EXPECT_LT(bytes, kMaxWorkspaceBytes);
    const GuardedBlock workspace(*device_, bytes);
    EXPECT_EQ(chiasma_decode_run(plan, &large_args_, workspace.data(), bytes, prepared.queue->stream()), CHIASMA_OK)
        << chiasma_last_error();
    std::string message;
    EXPECT_TRUE(prepared.queue->synchronize(&message)) << message;
    EXPECT_TRUE(workspace.guards_intact()) << "a write outside the scratch memory";
    for (const LargeTensor& tensor : outputs_) EXPECT_TRUE(tensor.block.guards_intact()) << "a write around out or lse";
    chiasma_decode_plan_destroy(plan);
  }

  // Every row has the bits of the same row in the small run.
  void expect_repeats(Prepared& prepared) {
    const chiasma_decode_args& small = prepared.runner->args();
    const void* references[] = {small.out.data, small.lse.data};
    for (std::size_t n = 0; n < outputs_.size(); ++n) {
      for (std::int64_t tile = 0; tile < kTiles; ++tile) {
        prepared.queue->count_differences(outputs_[n].tile(tile), static_cast<const std::byte*>(references[n]),
                                          outputs_[n].tile_bytes);
      }
    }
    expect_no_differences(*prepared.queue, "rows of the large call against those of the small one");
  }

  // The first, a middle and the last rows against the oracle.
  void expect_right_samples(Prepared& prepared) {
    const chiasma_decode_args& host = prepared.workload->args();
    const Case& spec = prepared.workload->spec();
    for (const std::int64_t tile : {std::int64_t{0}, kTiles / 2 + 1, kTiles - 1}) {
      const chiasma_tensor* outputs[] = {&host.out, &host.lse};
      for (std::size_t n = 0; n < outputs_.size(); ++n) {
        ASSERT_TRUE(device_->copy_to_host(static_cast<std::byte*>(outputs[n]->data), outputs_[n].tile(tile),
                                          outputs_[n].tile_bytes));
      }
      const CheckReport report =
          check(*prepared.workload, tolerance_of(CHIASMA_CUDA, spec), {.max_multiply_adds = 2e8, .rows = {0, 31, 63}});
      EXPECT_TRUE(report.passed) << "tile " << tile << " of " << to_line(spec) << "\n" << report.failure;
    }
  }

  void check_large(const std::string& line, int dim) {
    const std::unique_ptr<Prepared> prepared = prepare(line + " invariant=1", GetParam());
    if (prepared == nullptr) return;
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
    if (!make_large(*prepared, dim)) {
      std::printf("LEFT OUT: not enough device memory for 65536 times %s\n", line.c_str());
      return;
    }
    for (const bool batch_invariant : {true, false}) {
      ASSERT_NO_FATAL_FAILURE(run_large(*prepared, batch_invariant));
      if (batch_invariant) expect_repeats(*prepared);
      expect_right_samples(*prepared);
      for (const LargeTensor& tensor : outputs_) {
        prepared->queue->fill(tensor.block.data(), kNanByte, tensor.block.bytes());
      }
    }
  }

  chiasma_decode_args large_args_{};
  std::vector<LargeTensor> inputs_;
  std::vector<LargeTensor> outputs_;  // out and lse
};

// 128 heads: q and out of more than 2^32 elements.
TEST_P(GpuLarge, ManyRequests) {
  check_large("decode b=64 h=8 pool=40 topk=5 scale=amax valid=0.9 garbage=1 len=random", 0);
  check_large("decode b=64 h=128 pool=200 topk=130 scale=amax valid=0.9 len=random sink=random", 0);
}

TEST_P(GpuLarge, ManyQueryTokens) {
  check_large("decode b=1 sq=64 h=8 pool=900 topk=130 scale=amax valid=0.9", 1);
  check_large("decode b=1 sq=64 h=128 pool=900 topk=5 scale=amax valid=0.9 garbage=1 sink=random", 1);
}

TEST_P(GpuLarge, LongRows) {
  for (const char* line : {"decode b=1 h=4 pool=131072 topk=131072 scale=amax",
                           "decode b=1 h=4 pool=140000 topk=131071 scale=amax valid=0.9 invariant=1"}) {
    const std::unique_ptr<Prepared> prepared = prepare(line, GetParam());
    if (prepared == nullptr) continue;
    ASSERT_NO_FATAL_FAILURE(run_reference(*prepared));
  }
}

// The pages of a small pool spread over as much memory as the device grants, by the page stride alone.
TEST_P(GpuLarge, PoolOfMostOfTheMemory) {
  constexpr std::int64_t kStrideUnit = 16;
  const std::unique_ptr<Prepared> prepared = prepare("decode b=1 h=16 pool=6000 scale=amax poison=nan", GetParam());
  if (prepared == nullptr) return;
  chiasma_device_info info = {};
  ASSERT_EQ(chiasma_device_query(/*number=*/1, &info), CHIASMA_OK) << chiasma_last_error();
  chiasma_decode_args args = prepared->runner->args();
  const std::int64_t num_pages = args.kv_cache.shape[0];
  const std::int64_t element_bytes = args.kv_cache.dtype == CHIASMA_BFLOAT16 ? 2 : 1;
  const std::int64_t page_bytes = args.kv_cache.stride[0] * element_bytes;
  std::int64_t stride = info.memory_bytes / 100 * 80 / num_pages / kStrideUnit * kStrideUnit;
  DeviceBlock pool = device_->allocate(static_cast<std::size_t>(num_pages * stride));
  for (; pool == nullptr && stride > (1 << 20);
       pool = device_->allocate(static_cast<std::size_t>(num_pages * stride))) {
    stride = stride / 2 / kStrideUnit * kStrideUnit;
  }
  ASSERT_NE(pool, nullptr);
  std::printf("pool of %.1f GB\n", static_cast<double>(num_pages * stride) * 1e-9);
  prepared->queue->fill(pool.get(), kNanByte, static_cast<std::size_t>(num_pages * stride));
  for (std::int64_t page = 0; page < num_pages; ++page) {
    prepared->queue->copy(pool.get() + page * stride,
                          static_cast<const std::byte*>(args.kv_cache.data) + page * page_bytes,
                          static_cast<std::size_t>(page_bytes));
  }
  args.kv_cache.data = pool.get();
  args.kv_cache.stride[0] = stride / element_bytes;
  const Runner& runner = *prepared->runner;
  ASSERT_EQ(
      chiasma_decode_run(runner.plan(), &args, runner.workspace(), runner.workspace_bytes(), prepared->queue->stream()),
      CHIASMA_OK)
      << chiasma_last_error();
  RunError error;
  ASSERT_TRUE(prepared->runner->fetch(&error)) << error.message;
  const Case& spec = prepared->workload->spec();
  const CheckReport report = check(*prepared->workload, tolerance_of(CHIASMA_CUDA, spec));
  EXPECT_TRUE(report.passed) << report.failure;
}

INSTANTIATE_TEST_SUITE_P(All, GpuLarge, testing::ValuesIn(cuda_kernels()), name_of_kernel);

}  // namespace
}  // namespace chiasma::harness
