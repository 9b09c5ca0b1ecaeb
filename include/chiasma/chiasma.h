/* Chiasma: FP8 sparse MLA decoding attention. The C interface.
 *
 * Every function that can fail returns a chiasma_status; chiasma_last_error() then holds, for the calling thread, a
 * message that names the argument, its value and what is allowed. Nothing here prints, exits, throws or allocates
 * device memory. All functions may be called from any thread; plans are immutable once made and may be shared.
 *
 * Names used in shape comments: b requests, s_q query tokens per request, h_q query heads, topk selected KV tokens per
 * query token, page tokens per cache page, d_qk width of a query (576 for v32 and bf16 caches, 512 for v4).
 */
#ifndef CHIASMA_CHIASMA_H_
#define CHIASMA_CHIASMA_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define CHIASMA_API
#else
#define CHIASMA_API __attribute__((visibility("default")))
#endif

/* In C++ the enumerations have C's representation and may hold any int, so that a wrong number can be refused. */
#ifdef __cplusplus
#define CHIASMA_ENUM_BASE : int
extern "C" {
#else
#define CHIASMA_ENUM_BASE
#endif

#define CHIASMA_VERSION_MAJOR 0
#define CHIASMA_VERSION_MINOR 1
#define CHIASMA_VERSION_PATCH 0

/* "major.minor.patch" of the library that is running, which may differ from the header's macros. */
CHIASMA_API const char* chiasma_version(void);

/* ---- Status ------------------------------------------------------------------------------------------------- */

typedef enum chiasma_status CHIASMA_ENUM_BASE {
  CHIASMA_OK = 0,
  CHIASMA_INVALID_ARGUMENT = 1, /* an argument breaks its documented rule */
  CHIASMA_UNSUPPORTED = 2, /* legal, but no kernel of this build and device does it; the message says what is missing */
  CHIASMA_DEVICE_UNAVAILABLE = 3, /* no such device, or this build has no support for its kind */
  CHIASMA_OUT_OF_MEMORY = 4,      /* a host allocation failed */
  CHIASMA_DEVICE_ERROR = 5,       /* the device runtime reported an error; the message quotes it */
  CHIASMA_INTERNAL_ERROR = 6      /* a defect of this library; please report the message */
} chiasma_status;

/* Static name of a status, such as "invalid argument". Never NULL. */
CHIASMA_API const char* chiasma_status_name(chiasma_status status);

/* Message of the calling thread's last failed call; "" before any failure. Valid until that thread's next failure. */
CHIASMA_API const char* chiasma_last_error(void);

/* ---- Tensors ------------------------------------------------------------------------------------------------ */

typedef enum chiasma_dtype CHIASMA_ENUM_BASE {
  CHIASMA_UINT8 = 1, /* raw cache bytes */
  CHIASMA_INT32 = 2,
  CHIASMA_INT64 = 3,
  CHIASMA_BFLOAT16 = 4,
  CHIASMA_FLOAT32 = 5,
  CHIASMA_FLOAT64 = 6
} chiasma_dtype;

/* The numbers are DLPack's. */
typedef enum chiasma_device_kind CHIASMA_ENUM_BASE { CHIASMA_CPU = 1, CHIASMA_CUDA = 2 } chiasma_device_kind;

typedef struct chiasma_device {
  chiasma_device_kind kind;
  int32_t index; /* 0 for the CPU */
} chiasma_device;

typedef struct chiasma_device_info {
  chiasma_device device;
  char name[128];
  int32_t compute_units;   /* CPU: hardware threads the process may use; CUDA: multiprocessors */
  int32_t cuda_capability; /* major * 10 + minor; 0 for the CPU */
  int64_t memory_bytes;
} chiasma_device_info;

#define CHIASMA_MAX_RANK 5

/* A view of caller-owned memory. rank 0 means "absent" and is how an optional argument is left out. Strides count
 * elements, are >= 0, and are ignored where the extent is 1 or any extent is 0. */
typedef struct chiasma_tensor {
  void* data; /* may be NULL where some extent is 0, and while planning */
  int32_t rank;
  chiasma_dtype dtype;
  chiasma_device device;
  int64_t shape[CHIASMA_MAX_RANK];
  int64_t stride[CHIASMA_MAX_RANK];
} chiasma_tensor;

/* A tensor with row-major contiguous strides. `rank` must be 0..CHIASMA_MAX_RANK; otherwise the result is absent. */
CHIASMA_API chiasma_tensor chiasma_contiguous(void* data, chiasma_dtype dtype, chiasma_device device, int32_t rank,
                                              const int64_t* shape);

/* ---- KV cache ----------------------------------------------------------------------------------------------- */

/* docs/kv_format.md has the layouts. */
typedef enum chiasma_kv_format CHIASMA_ENUM_BASE {
  CHIASMA_KV_V32 = 1,       /* 656 bytes a token: 512 e4m3, 4 float32 scales, 64 bf16 (DeepSeek V3.2, GLM-5) */
  CHIASMA_KV_V4 = 2,        /* 584 bytes: 448 e4m3, 64 bf16, 7 ue8m0 scales kept at the page's end (DeepSeek V4.0) */
  CHIASMA_KV_BF16 = 3,      /* 576 bf16 */
  CHIASMA_KV_V41 = 4,       /* 528 bytes: 512 e4m3, 16 ue8m0 scales (DeepSeek V4.1) */
  CHIASMA_KV_V41_PLANE = 5, /* 528 bytes: 512 e4m3, 16 ue8m0 scales kept at the page's end (the same, older) */
  CHIASMA_KV_V32_NOPE = 6,  /* 656 bytes: as V32, the last 128 never read; d_qk 512 (GLM-5.3-Flash) */
  CHIASMA_KV_V32_NOPE_COMPACT = 7, /* 528 bytes: the same without those */
  CHIASMA_KV_FP8 = 8,              /* 576 e4m3, one float32 scale for the whole cache: kv_scale */
  CHIASMA_KV_FP8_NOPE = 9,         /* 512 e4m3, likewise; d_qk 512 */
  CHIASMA_KV_BF16_NOPE = 10        /* 512 bf16; d_qk 512 */
} chiasma_kv_format;

typedef enum chiasma_scale_mode CHIASMA_ENUM_BASE {
  CHIASMA_SCALE_POW2 = 1, /* 2^ceil(log2(max(amax / 448, 1e-4))) */
  CHIASMA_SCALE_AMAX = 2  /* amax / 448 */
} chiasma_scale_mode;

/* Smallest page stride in bytes that the writers of a format use for pages of `page` tokens; 0 for bad arguments. */
CHIASMA_API int64_t chiasma_kv_page_bytes(chiasma_kv_format format, int64_t page);

/* Width of a query and key of a format: 576 or 512; 0 for an unknown format. */
CHIASMA_API int32_t chiasma_kv_dim(chiasma_kv_format format);
/* Last extent of a cache tensor: bytes of a token, or numbers of a token for bf16 formats. 0 for an unknown format.
 * Three formats have 528, so that a width alone does not tell a format. */
CHIASMA_API int64_t chiasma_kv_width(chiasma_kv_format format);
/* "v32", "v4", ...; "unknown". Never NULL. The formats are numbered from 1 on without gaps. */
CHIASMA_API const char* chiasma_kv_format_name(chiasma_kv_format format);

/* d_qk^-1/2, the softmax scale used when a model states none. 0 for an unknown format. */
CHIASMA_API double chiasma_default_sm_scale(chiasma_kv_format format);

/* ---- Decode ------------------------------------------------------------------------------------------------- */

/* One decode call. Zero-initialise, then fill: absent optional tensors are then already right.
 *
 * For each query token, softmax(sm_scale * q . K) over the selected rows, times V; natural logarithm.
 *   - An index counts only if 0 <= index < num_pages * page; anything else is masked, wherever it stands. A slot named
 *     twice counts twice. Bytes of slots that are not selected never influence a result.
 *   - A row with no valid entry gives out = 0 and lse = -infinity.
 *   - attn_sink multiplies out by exp(lse) / (exp(lse) + exp(sink)) and leaves lse alone.
 * Outputs must not overlap the inputs or themselves. All tensors live on one device. */
typedef struct chiasma_decode_args {
  chiasma_kv_format format;
  double sm_scale; /* any finite number; chiasma_default_sm_scale() is the models' default */
  double kv_scale; /* FP8 and FP8_NOPE: what every code of the cache is multiplied by, > 0; 0 stands for 1. Other
                      formats: 0 or 1 */

  chiasma_tensor q;        /* bf16 [b, s_q, h_q, d_qk]; h_q 1..128; last dimension contiguous. With q_rope:
                              [b, s_q, h_q, d_qk - 64], the columns in front of the rotary ones */
  chiasma_tensor q_rope;   /* optional bf16 [b, s_q, h_q, 64], with strides of its own: the query's last 64 columns,
                              for callers that never join the two; last dimension contiguous */
  chiasma_tensor kv_cache; /* uint8 [num_pages, page, width], bf16 for the bf16 formats; or with a head dimension of 1
                              before the last. chiasma_kv_width() gives the width. Any page >= 1. stride(0) is any
                              number that holds a page; rows inside a page are packed. On a CUDA device stride(0) and
                              the address are multiples of 16 bytes; on the CPU the address is any, for bf16, too. */
  chiasma_tensor
      indices; /* int32 [b, s_q, topk]; topk >= 0; last dimension contiguous. Slots: page_index * page + offset */
  chiasma_tensor topk_length; /* optional int32 [b], or [b, s_q] with a length for each query token: how many leftmost
                                 entries of the row count, clamped to [0, topk]; what lies behind is not read */
  chiasma_tensor attn_sink;   /* optional float32 [h_q] */

  /* Optional second cache, V4, V41 and V41_PLANE only; same rules, its own page size. Attended together with the first.
   */
  chiasma_tensor extra_kv_cache;
  chiasma_tensor extra_indices;     /* int32 [b, s_q, extra_topk] */
  chiasma_tensor extra_topk_length; /* optional int32 [b] or [b, s_q] */

  chiasma_tensor out; /* bf16 [b, s_q, h_q, 512]; last dimension contiguous */
  chiasma_tensor lse; /* float32 [b, s_q, h_q] */
} chiasma_decode_args;

/* What a plan may decide on. Zero-initialised means "choose for me, on the tensors' device". */
typedef struct chiasma_plan_options {
  const char* kernel;      /* a registry name, or NULL: the environment's CHIASMA_KERNEL, else the best that fits */
  int32_t batch_invariant; /* nonzero: a request's bits do not depend on what else is in the batch */
  int32_t num_splits;      /* parts that each row of indices is divided into; 0 = automatic */
  int32_t num_threads;     /* CPU only: worker threads; 0 = all that the process may use. Never changes a result. */
  const chiasma_device_info* device_info; /* plan for this device instead of asking the tensors' own, so that planning
                                             needs no device; NULL: ask */
} chiasma_plan_options;

typedef struct chiasma_decode_plan chiasma_decode_plan; /* opaque, immutable */

/* Chooses a kernel and a schedule from shapes, strides, dtypes and options alone: tensor contents and addresses are not
 * looked at, so a plan stays right when a CUDA graph is replayed with other data. `options` may be NULL. On success
 * *plan is to be released with chiasma_decode_plan_destroy(); on failure it is NULL.
 * CHIASMA_UNSUPPORTED's message lists each kernel considered and what it lacks. */
CHIASMA_API chiasma_status chiasma_decode_plan_create(const chiasma_decode_args* args,
                                                      const chiasma_plan_options* options, chiasma_decode_plan** plan);
CHIASMA_API void chiasma_decode_plan_destroy(chiasma_decode_plan* plan); /* NULL is allowed */

/* Bytes of scratch memory that chiasma_decode_run() needs on the plan's device. May be 0. */
CHIASMA_API size_t chiasma_decode_plan_workspace_bytes(const chiasma_decode_plan* plan);
/* Registry name of the chosen kernel, and a text of several lines that says what was chosen and why. They live as long
 * as the plan. */
CHIASMA_API const char* chiasma_decode_plan_kernel(const chiasma_decode_plan* plan);
CHIASMA_API const char* chiasma_decode_plan_text(const chiasma_decode_plan* plan);

/* Runs a plan. `args` must have the shapes, dtypes, devices and optional tensors that it was made for; addresses,
 * strides and contents may differ. `workspace`: at least workspace_bytes, 256-byte aligned, on the plan's device, used
 * by one run at a time; its contents need no initialisation and carry nothing from run to run. `stream` is a
 * cudaStream_t (NULL: the default stream), ignored on the CPU. CUDA work is queued and not waited for; CPU work is done
 * on return. Nothing is written on failure. */
CHIASMA_API chiasma_status chiasma_decode_run(const chiasma_decode_plan* plan, const chiasma_decode_args* args,
                                              void* workspace, size_t workspace_bytes, void* stream);

/* ---- The oracle --------------------------------------------------------------------------------------------- */

/* float64 reference results for some query tokens of a decode call, computed plainly from the stored bytes, on the CPU
 * (all tensors of args must be there; out and lse of args are ignored and may be absent). rows[n] = request * s_q +
 * query token selects the n-th result; rows NULL means all, in order, and num_rows must then be b * s_q. out [num_rows,
 * h_q, 512], lse [num_rows, h_q]. value_rms [num_rows, h_q], optional: root mean square of the selected V rows weighted
 * by their probabilities, the yardstick for rows whose values cancel. term_rms [num_rows, h_q, 512], optional: the root
 * of the sum over tokens of (p_t (V[t][c] - out[c]))^2, tokens of equal score added up before they are squared, times
 * the sink's factor: what rounding the probabilities, each by a share of it, costs an element of out. */
CHIASMA_API chiasma_status chiasma_decode_oracle(const chiasma_decode_args* args, const int64_t* rows, int64_t num_rows,
                                                 double* out, double* lse, double* value_rms, double* term_rms);

/* ---- Merge -------------------------------------------------------------------------------------------------- */

/* Combines partial results over disjoint sets of KV tokens, as context parallelism needs:
 * lse = log(sum_i exp(lse_i)), out = sum_i exp(lse_i - lse) * out_i. A part with lse = -infinity is an exact identity,
 * whatever its out holds; all parts empty gives (0, -infinity). An lse of NaN or +infinity makes its row NaN, but
 * plus_infinity_is_empty lets +infinity stand for an empty part, too, as some kernels write it. Computed in float64,
 * with the same bits on every device. */
typedef struct chiasma_merge_args {
  chiasma_tensor part_out;        /* bf16 or float32 [parts, b, s_q, h_q, 512]; parts >= 1 */
  chiasma_tensor part_lse;        /* float32 [parts, b, s_q, h_q] */
  chiasma_tensor out;             /* bf16 or float32 [b, s_q, h_q, 512] */
  chiasma_tensor lse;             /* float32 [b, s_q, h_q] */
  int32_t plus_infinity_is_empty; /* nonzero: a part with lse = +infinity is empty, as one with -infinity is */
} chiasma_merge_args;

CHIASMA_API chiasma_status chiasma_merge(const chiasma_merge_args* args, void* stream);

/* ---- Cache operations ---------------------------------------------------------------------------------------

 * Each runs where its tensors are, with the same bits on every device. `stream` as in chiasma_decode_run(): work on a
 * CUDA device is queued and not waited for, and needs compute capability 9.0. Nothing is written on failure. */

/* Quantises rows and stores them in a paged cache. Rounds to nearest even and saturates at 448. A tile of zeros, of
 * either sign, gets codes 0 and a finite positive scale. A NaN or infinity becomes the NaN code 0x7F and stays within
 * its tile, whose scale is chosen from the finite values. Numbers that a format keeps as bf16 are copied bit for bit.
 */
typedef struct chiasma_quantize_args {
  chiasma_kv_format format;    /* any; into the bf16 formats rows are copied */
  chiasma_scale_mode scale;    /* formats with ue8m0 scales have only POW2; ignored where tiles have no scales */
  double kv_scale;             /* as in chiasma_decode_args: FP8 codes are e4m3(value / kv_scale) */
  chiasma_tensor kv;           /* bf16 [tokens, d_qk], RoPE last; last dimension contiguous. With rope: [tokens, d_qk -
                                  64], the columns in front of the rotary ones */
  chiasma_tensor rope;         /* optional bf16 [tokens, 64], with strides of its own; last dimension contiguous */
  chiasma_tensor slot_mapping; /* optional int64 [tokens]: slot of each row, anything outside the cache, -1 included,
                                  skips it; absent: row i goes to slot i. Two rows with one slot: on the CPU the later
                                  one wins; on a CUDA device the slot then holds undefined bytes */
  chiasma_tensor kv_cache;     /* as in chiasma_decode_args */
  chiasma_tensor
      nonfinite_count; /* optional int64 [1]: receives the number of NaN and infinite inputs among rows stored */
  chiasma_tensor skipped_count; /* optional int64 [1]: receives the number of rows whose slot is neither in the cache
                                   nor -1, which is how callers skip a row on purpose */
} chiasma_quantize_args;

CHIASMA_API chiasma_status chiasma_quantize(const chiasma_quantize_args* args, void* stream);

/* The other way: every slot of a cache as float32 or bf16 rows (bf16 rounds to nearest even). */
typedef struct chiasma_dequantize_args {
  chiasma_kv_format format; /* any; the numbers of bf16 formats are copied, or widened */
  double kv_scale;          /* as in chiasma_decode_args */
  chiasma_tensor kv_cache;  /* as in chiasma_decode_args */
  chiasma_tensor kv;        /* float32 or bf16 [num_pages, page, d_qk], RoPE last; last dimension contiguous */
} chiasma_dequantize_args;

CHIASMA_API chiasma_status chiasma_dequantize(const chiasma_dequantize_args* args, void* stream);

/* Some rows of a cache, as prefill over a quantised cache needs them. Two ways to say which:
 *   slots        row i of kv receives slot slots[i]
 *   block_table  token t of request i, 0 <= t < seq_lens[i], goes to row starts[i] + t of kv. It lies in page
 *                block_table[i, t / page], at t % page. seq_lens is clamped to [0, max_pages * page]. Rows outside kv
 *                are not written, rows of kv that no token goes to are left as they are, and where two requests meet in
 *                one row its content is undefined.
 * A slot or page outside the cache, -1 included, gives a row of zeros. Values as in chiasma_dequantize(). */
typedef struct chiasma_gather_args {
  chiasma_kv_format format;   /* any */
  double kv_scale;            /* as in chiasma_decode_args */
  chiasma_tensor kv_cache;    /* as in chiasma_decode_args */
  chiasma_tensor slots;       /* int32 or int64 [rows]; absent with block_table */
  chiasma_tensor block_table; /* int32 [b, max_pages]; last dimension contiguous; absent with slots */
  chiasma_tensor seq_lens;    /* int32 [b]; present with block_table */
  chiasma_tensor starts;      /* int32 or int64 [b]; present with block_table */
  chiasma_tensor kv;          /* float32 or bf16 [rows, d_qk], RoPE last; last dimension contiguous */
} chiasma_gather_args;

CHIASMA_API chiasma_status chiasma_gather_dequantize(const chiasma_gather_args* args, void* stream);

/* From what an indexer selects, tokens of a request, to what chiasma_decode_run() takes, slots of the cache.
 *   slot = block_table[r, t / page] * page + t % page, where t is the token and r the request of its row.
 * With context parallelism (cp_world > 1) tokens are dealt out to ranks in runs of cp_interleave. Only those with
 * (token / cp_interleave) % cp_world == cp_rank are this rank's, and t = token / (cp_world * cp_interleave) *
 * cp_interleave + token % cp_interleave is their number in its own cache and block table.
 * What has no slot becomes -1: a negative token, one behind the block table, one of another rank, a negative page, a
 * slot beyond int32. Without block_table the indices are slots already and are only narrowed to int32, by the same
 * rule. */
typedef struct chiasma_translate_args {
  chiasma_tensor indices;     /* int32 or int64 [b, s_q, topk]; last dimension contiguous */
  chiasma_tensor block_table; /* optional int32 [requests, max_pages]; last dimension contiguous */
  chiasma_tensor request;     /* optional int32 [b]: row of block_table for each b, all -1 where it is out of range;
                                 absent: row i for i, and requests must be b. Only with block_table */
  int64_t page;               /* tokens of a cache page, 1 to 2^31 - 1; ignored without block_table */
  int32_t cp_world;           /* ranks of context parallelism; 0 or 1: none. Only with block_table */
  int32_t cp_rank;            /* 0 to cp_world - 1 */
  int32_t cp_interleave;      /* tokens of a run; 0 or 1: one */
  chiasma_tensor slots;       /* int32 [b, s_q, topk]; last dimension contiguous. May be indices itself if int32 */
} chiasma_translate_args;

CHIASMA_API chiasma_status chiasma_translate_indices(const chiasma_translate_args* args, void* stream);

/* ---- Devices and kernels ------------------------------------------------------------------------------------ */

/* Devices this build can use on this machine; the CPU is always number 0. Fails with an index out of range. */
CHIASMA_API int32_t chiasma_device_count(void);
CHIASMA_API chiasma_status chiasma_device_query(int32_t number, chiasma_device_info* info);
/* CHIASMA_OK, or why CUDA cannot be used: not in this build, no driver, no device. */
CHIASMA_API chiasma_status chiasma_cuda_available(void);

typedef struct chiasma_kernel_info {
  const char* name; /* the string that logs, results, --kernel and CHIASMA_KERNEL use */
  chiasma_device_kind device_kind;
  const char* summary;  /* one line */
  const char* supports; /* one line: formats, heads, options, hardware */
} chiasma_kernel_info;

CHIASMA_API int32_t chiasma_kernel_count(void);
CHIASMA_API chiasma_status chiasma_kernel_query(int32_t number, chiasma_kernel_info* info);
/* CHIASMA_OK if the named kernel can do this call; otherwise the message says what it lacks. */
CHIASMA_API chiasma_status chiasma_kernel_check(const char* kernel, const chiasma_decode_args* args);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* CHIASMA_CHIASMA_H_ */
