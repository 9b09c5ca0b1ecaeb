// What the C interface does not say of a format: which dtype its caches have, and whether these two tell it.
#pragma once

#include <cstdint>

#include "chiasma/chiasma.h"

namespace chiasma::python {

inline constexpr auto kNoFormat = static_cast<chiasma_kv_format>(0);

// Whether caches are bytes, and not bf16 numbers.
constexpr bool holds_bytes(chiasma_kv_format format) {
  return format != CHIASMA_KV_BF16 && format != CHIASMA_KV_BF16_NOPE;
}

// The format that a cache of this dtype and width has, where only one comes into question: v32nope has v32's width, but
// another query's. Everything else has to be named, because one format read as another gives plausible garbage.
constexpr chiasma_kv_format infer_format(bool bytes, std::int64_t width) {
  if (bytes) return width == 656 ? CHIASMA_KV_V32 : width == 584 ? CHIASMA_KV_V4 : kNoFormat;
  return width == 576 ? CHIASMA_KV_BF16 : width == 512 ? CHIASMA_KV_BF16_NOPE : kNoFormat;
}

}  // namespace chiasma::python
