// Copies that run behind the thread that asked for them, and stores into a peer's shared memory. PTX ISA, "cp.async",
// "cp.async.bulk", "st.async".
#pragma once

#include <cstdint>

namespace chiasma::ptx {

// 16 bytes of global memory into shared memory, past L1.
__device__ __forceinline__ void copy_async_16(std::uint32_t shared_address, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global) : "memory");
}
// Arrives on a barrier once all copies that this thread asked for so far are there; one of the barrier's count.
__device__ __forceinline__ void copy_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Asks for the line of an address, into L2. PTX ISA, "prefetch".
__device__ __forceinline__ void prefetch_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most kPending groups of this thread are in flight.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Global memory into shared memory of this block by the copy engine, which completes the bytes on a barrier. Addresses
// and size are multiples of 16.
__device__ __forceinline__ void copy_bulk_from_global(std::uint32_t shared_address, const void* global,
                                                      std::uint32_t bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// 16 bytes of registers into a block of the cluster; completes them on a barrier there.
__device__ __forceinline__ void store_async_16(std::uint32_t cluster_address, uint4 value,
                                               std::uint32_t cluster_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   cluster_address),
               "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(cluster_barrier)
               : "memory");
}

}  // namespace chiasma::ptx
