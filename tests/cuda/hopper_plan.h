// What a plan for a Hopper GPU needs, with no device there: the device's description, and tensors without data.
#pragma once

#include <cstring>

#include "chiasma/chiasma.h"

namespace chiasma {

inline chiasma_device_info hopper() {
  chiasma_device_info info = {};
  info.device = {CHIASMA_CUDA, 0};
  std::strcpy(info.name, "a GPU of compute capability 9.0");
  info.compute_units = 132;
  info.cuda_capability = 90;
  info.memory_bytes = std::int64_t{140} << 30;
  return info;
}

struct Shape {
  std::int64_t b, s_q, h_q, topk;
};

inline chiasma_decode_args args_of(const Shape& shape) {
  const chiasma_device device = {CHIASMA_CUDA, 0};
  const auto tensor = [&](chiasma_dtype dtype, std::initializer_list<std::int64_t> extents) {
    return chiasma_contiguous(nullptr, dtype, device, static_cast<std::int32_t>(extents.size()), extents.begin());
  };
  chiasma_decode_args args = {};
  args.format = CHIASMA_KV_V32;
  args.sm_scale = chiasma_default_sm_scale(CHIASMA_KV_V32);
  args.q = tensor(CHIASMA_BFLOAT16, {shape.b, shape.s_q, shape.h_q, 576});
  args.kv_cache = tensor(CHIASMA_UINT8, {1000, 64, 656});
  args.indices = tensor(CHIASMA_INT32, {shape.b, shape.s_q, shape.topk});
  args.out = tensor(CHIASMA_BFLOAT16, {shape.b, shape.s_q, shape.h_q, 512});
  args.lse = tensor(CHIASMA_FLOAT32, {shape.b, shape.s_q, shape.h_q});
  return args;
}

}  // namespace chiasma
