// The paged cache of a file: which format it has and how its pages lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "chiasma/chiasma.h"
#include "cli/safetensors.h"

namespace chiasma::cli {

struct CacheTensor {
  chiasma_kv_format format;
  chiasma_tensor tensor;             // on the CPU, as the C interface wants it
  std::span<const std::byte> bytes;  // of the file, at any address
};

// metadata "format" decides; without it the dtype and the extents do, where they tell one format. A cache of two
// dimensions is [slots, width], or [num_pages, bytes per page] with the page size in metadata `page_key`; the latter is
// how pages with padding between them are written. Throws CommandError.
CacheTensor read_cache(const SafetensorsFile& file, const std::string& name, const std::string& page_key);

// metadata "kv_scale" of formats with one scale for the whole cache, else 0. Throws CommandError where it is missing.
double read_kv_scale(const SafetensorsFile& file, chiasma_kv_format format);

// Slots of a cache; 0 where their number overflows.
std::int64_t num_slots(const chiasma_tensor& cache);

}  // namespace chiasma::cli
