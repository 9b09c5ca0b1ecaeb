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
  std::int64_t page_stride_bytes;  // as data, a multiple of 16 on a CUDA device and any number on the CPU
  std::int64_t num_pages;
  std::int64_t page_size;  // tokens; num_pages * page_size does not overflow
  float scale = 1.0f;      // of formats with one for the whole cache; elsewhere 1

  CHIASMA_HOST_DEVICE constexpr std::int64_t num_slots() const { return num_pages * page_size; }
};

// Which rows of a pool each query token attends to.
struct Selection {
  const std::int32_t* indices;  // [b, s_q, topk], contiguous in topk; null when topk is 0 or the pool is absent
  std::int64_t stride_b, stride_s;
  std::int64_t topk;
  const std::int32_t* length;                     // [b, s_q], or null: all of topk
  std::int64_t length_stride_b, length_stride_s;  // the latter 0 where a request has one length
};

struct DecodeProblem {
  KvFormat format;
  float sm_scale;  // finite
  std::int64_t b, s_q;
  int h_q;  // 1..128

  // A query's columns in front of the rotary ones, and those. Both may lie in one tensor, q_rope then kRopeDim columns
  // from the end of its rows.
  const bf16_t* q;  // [b, s_q, h_q, key_dim(format) - kRopeDim]
  std::int64_t q_stride_b, q_stride_s, q_stride_h;
  const bf16_t* q_rope;  // [b, s_q, h_q, kRopeDim]
  std::int64_t q_rope_stride_b, q_rope_stride_s, q_rope_stride_h;
  bool q_is_one_tensor;  // q_rope is q + key_dim(format) - kRopeDim, with the same strides

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
  bool plus_infinity_is_empty;
};

struct QuantizeProblem {
  KvFormat format;
  ScaleMode scale;
  std::int64_t tokens;
  const bf16_t* kv;  // [tokens, key_dim(format) - kRopeDim]
  std::int64_t kv_stride;
  const bf16_t* rope;  // [tokens, kRopeDim], the last columns
  std::int64_t rope_stride;
  const std::int64_t* slot_mapping;  // [tokens], or null: row i goes to slot i
  std::int64_t slot_mapping_stride;
  std::byte* cache;  // the same memory as pool.data, to write to
  KvPool pool;
  std::int64_t* nonfinite_count;  // null: not wanted
  std::int64_t* skipped_count;    // likewise
};

struct DequantizeProblem {
  KvFormat format;
  KvPool cache;
  void* kv;  // [num_pages, page_size, key_dim(format)]
  bool kv_is_bf16;
  std::int64_t kv_stride_page, kv_stride_token;
};

// int32 or int64 numbers, some distance apart.
struct IntegerView {
  const void* data;
  bool is_int64;
  std::int64_t stride;
};

struct GatherProblem {
  KvFormat format;
  KvPool cache;
  std::int64_t rows;
  void* kv;  // [rows, key_dim(format)]
  bool kv_is_bf16;
  std::int64_t kv_stride;

  IntegerView slots;  // [rows]; data null: block_table says which

  std::int64_t b, max_pages;
  const std::int32_t* block_table;  // [b, max_pages]
  std::int64_t block_table_stride;
  const std::int32_t* seq_lens;  // [b]
  std::int64_t seq_lens_stride;
  IntegerView starts;  // [b]
};

struct TranslateProblem {
  std::int64_t b, s_q, topk;
  const void* indices;  // [b, s_q, topk]
  bool indices_are_int64;
  std::int64_t indices_stride_b, indices_stride_s;
  std::int32_t* slots;  // [b, s_q, topk]
  std::int64_t slots_stride_b, slots_stride_s;

  const std::int32_t* block_table;  // [requests, max_pages], or null: indices are slots
  std::int64_t requests, max_pages, block_table_stride;
  const std::int32_t* request;  // [b], or null: i for i
  std::int64_t request_stride;
  std::int64_t page_size;
  std::int64_t cp_world, cp_rank, cp_interleave;  // world >= 1, interleave >= 1
};

}  // namespace chiasma
