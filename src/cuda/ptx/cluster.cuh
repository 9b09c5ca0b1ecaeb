// Thread-block clusters and distributed shared memory. PTX ISA, "mapa", "barrier.cluster", "cp.async.bulk".
#pragma once

#include <cstdint>

namespace chiasma::ptx {

__device__ __forceinline__ std::uint32_t cluster_block_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Address, in the cluster's window, of what lies at `address` in the shared memory of block `rank`.
__device__ __forceinline__ std::uint32_t map_to_peer(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// All threads of all blocks of the cluster. The instruction wants a warp's lanes together, which the compiler does not
// see to behind code for some of them: a warp that arrives in two parts counts twice, and blocks start or leave too
// early (seen on an H200 as a launch failure now and then, 2026-11-30).
__device__ __forceinline__ void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Copies shared memory of this block into a block of the cluster with the copy engine (async proxy), and completes that
// many bytes on a barrier there. Addresses and size are multiples of 16.
__device__ __forceinline__ void copy_bulk_to_peer(std::uint32_t cluster_address, std::uint32_t address,
                                                  std::uint32_t bytes, std::uint32_t cluster_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   cluster_address),
               "r"(address), "r"(bytes), "r"(cluster_barrier)
               : "memory");
}

}  // namespace chiasma::ptx
