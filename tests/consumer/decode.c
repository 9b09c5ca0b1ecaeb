/* A C11 program that plans and runs the smallest decode: one query head, one cached token whose scales are not powers
 * of two. Exits 0 if the result is that token's value vector. */
#include <chiasma/chiasma.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROW_BYTES = 656, PAGE = 2, KEY_DIM = 576, VALUE_DIM = 512, TILE = 128, SCALES_OFFSET = 512 };

static const chiasma_device cpu = {CHIASMA_CPU, 0};

static int fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, chiasma_last_error());
  return EXIT_FAILURE;
}

static float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

int main(void) {
  static alignas(16) unsigned char cache[PAGE * ROW_BYTES];
  static alignas(16) uint16_t q[KEY_DIM];
  static alignas(16) uint16_t out[VALUE_DIM];
  const float scales[VALUE_DIM / TILE] = {1.75f, 0.30078125f, 1.5f, 3.0f};
  int32_t index = 1;
  float lse = -1.0f;

  unsigned char* row = cache + ROW_BYTES;
  memset(row, 0x38, SCALES_OFFSET); /* 1.0 in e4m3 */
  memcpy(row + SCALES_OFFSET, scales, sizeof scales);

  chiasma_decode_args args;
  memset(&args, 0, sizeof args);
  args.format = CHIASMA_KV_V32;
  args.sm_scale = chiasma_default_sm_scale(CHIASMA_KV_V32);
  args.q = chiasma_contiguous(q, CHIASMA_BFLOAT16, cpu, 4, (const int64_t[]){1, 1, 1, KEY_DIM});
  args.kv_cache = chiasma_contiguous(cache, CHIASMA_UINT8, cpu, 3, (const int64_t[]){1, PAGE, ROW_BYTES});
  args.indices = chiasma_contiguous(&index, CHIASMA_INT32, cpu, 3, (const int64_t[]){1, 1, 1});
  args.out = chiasma_contiguous(out, CHIASMA_BFLOAT16, cpu, 4, (const int64_t[]){1, 1, 1, VALUE_DIM});
  args.lse = chiasma_contiguous(&lse, CHIASMA_FLOAT32, cpu, 3, (const int64_t[]){1, 1, 1});

  chiasma_decode_plan* plan = NULL;
  if (chiasma_decode_plan_create(&args, NULL, &plan) != CHIASMA_OK) return fail("plan");
  const size_t workspace_bytes = chiasma_decode_plan_workspace_bytes(plan);
  void* workspace = aligned_alloc(256, (workspace_bytes / 256 + 1) * 256);
  if (workspace == NULL) return fail("aligned_alloc");
  if (chiasma_decode_run(plan, &args, workspace, workspace_bytes, NULL) != CHIASMA_OK) return fail("run");

  int wrong = lse != 0.0f;
  for (int i = 0; i < VALUE_DIM; ++i) wrong += from_bf16(out[i]) != scales[i / TILE];
  printf("chiasma %s, kernel %s: %d wrong values\n", chiasma_version(), chiasma_decode_plan_kernel(plan), wrong);
  free(workspace);
  chiasma_decode_plan_destroy(plan);
  return wrong == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
