// Named barriers, proxy fences, register hand-over and dependent launch. PTX ISA, "bar", "fence", "setmaxnreg",
// "griddepcontrol".
#pragma once

#include <cstdint>

namespace chiasma::ptx {

// The lane's number, worked out where it stands: what depends on it is not kept in registers from before.
__device__ __forceinline__ int lane_id_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)::"memory");
  return lane;
}

// A number that is the same in all lanes of a whole warp anyway, so that the compiler knows it, too, and works with it
// in uniform registers.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

// Barrier `id` (1..15; 0 is __syncthreads) among num_threads threads, whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// True in one lane of a whole warp. The compiler knows that it is one, as it does not of lane 0.
__device__ __forceinline__ bool elect_lane() {
  std::uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected));
  return elected != 0;
}

// Like named_barrier_sync(), and the answer to whether `vote` was true for any of the threads.
__device__ __forceinline__ bool named_barrier_any(int id, int num_threads, bool vote) {
  std::uint32_t any;
  asm volatile(
      "{\n.reg .pred vote, any;\n"
      "setp.ne.u32 vote, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, vote;\n"
      "selp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<std::uint32_t>(vote)), "r"(id), "r"(num_threads)
      : "memory");
  return any != 0;
}

// Orders this thread's ordinary shared-memory accesses with those of the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Whole warpgroups only; the kernel's register cap at launch bounds the sum.
template <int kRegisters>
__device__ __forceinline__ void registers_raise() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_lower() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Lets the next kernel of the stream begin its preamble; its grid_dependency_wait() still waits for this whole grid.
__device__ __forceinline__ void grid_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void grid_dependency_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace chiasma::ptx
