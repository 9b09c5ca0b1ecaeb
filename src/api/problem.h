// Validated problems: what remains of the C structs once every shape, stride and dtype has been checked. Backends see
// only these. Strides count elements of the pointer's type unless the name says bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/kv_format.h"
#include "format/numbers.h"

namespace chiasma {

// A paged pool of KV rows.
struct KvPool {
  const std::byte* data;           // [num_pages] pages, page_stride_bytes apart
  std::int64_t page_stride_bytes;  // multiple of 16
  std::int64_t num_pages;
  std::int64_t page_size;  // tokens; num_pages * page_size does not overflow

  CHIASMA_HOST_DEVICE constexpr std::int64_t num_slots() const { return num_pages * page_size; }
};

// Which rows of a pool each query token attends to.
struct Selection {
  const std::int32_t* indices;  // [b, s_q, topk], contiguous in topk; null when topk is 0 or the pool is absent
  std::int64_t stride_b, stride_s;
  std::int64_t topk;
  const std::int32_t* length;  // [b], or null: all of topk
  std::int64_t length_stride;
};

struct DecodeProblem {
  KvFormat format;
  float sm_scale;  // finite
  std::int64_t b, s_q;
  int h_q;  // 1..128

  const bf16_t* q;  // [b, s_q, h_q, key_dim(format)]
  std::int64_t q_stride_b, q_stride_s, q_stride_h;

  KvPool kv;
  Selection selection;
  KvPool extra_kv;            // num_pages 0 when absent
  Selection extra_selection;  // topk 0 when absent

  const float* attn_sink;  // [h_q], or null
  std::int64_t attn_sink_stride;

  bf16_t* out;  // [b, s_q, h_q, kValueDim]
  std::int64_t out_stride_b, out_stride_s, out_stride_h;
  float* lse;  // [b, s_q, h_q]
  std::int64_t lse_stride_b, lse_stride_s, lse_stride_h;

  CHIASMA_HOST_DEVICE constexpr std::int64_t num_rows() const { return b * s_q; }
};

struct MergeProblem {
  std::int64_t parts, b, s_q, h_q;
  const void* part_out;  // [parts, b, s_q, h_q, kValueDim]
  bool part_out_is_bf16;
  std::int64_t part_out_stride[4];
  const float* part_lse;  // [parts, b, s_q, h_q]
  std::int64_t part_lse_stride[4];
  void* out;  // [b, s_q, h_q, kValueDim]
  bool out_is_bf16;
  std::int64_t out_stride[3];
  float* lse;  // [b, s_q, h_q]
  std::int64_t lse_stride[3];
};

struct QuantizeProblem {
  KvFormat format;  // v32 or v4
  ScaleMode scale;
  std::int64_t tokens;
  const bf16_t* kv;  // [tokens, key_dim(format)]
  std::int64_t kv_stride;
  const std::int64_t* slot_mapping;  // [tokens], or null: row i goes to slot i
  std::int64_t slot_mapping_stride;
  std::byte* cache;  // as KvPool
  std::int64_t page_stride_bytes, num_pages, page_size;
  std::int64_t* nonfinite_count;  // null: not wanted
};

struct DequantizeProblem {
  KvFormat format;  // v32 or v4
  KvPool cache;
  void* kv;  // [num_pages, page_size, key_dim(format)]
  bool kv_is_bf16;
  std::int64_t kv_stride_page, kv_stride_token;
};

}  // namespace chiasma
