// The launch of one format's kernels; a translation unit each, rows_*.cu, so that they compile side by side. Host code.
#pragma once

#include "cuda/split_plan.h"

namespace chiasma::sm90_sparse_fp8_direct {

struct Launch {
  int heads_per_block;
  std::int32_t device;  // the current one
  unsigned num_groups;  // of thread blocks that share rows
  void* stream;         // cudaStream_t
};

template <KvFormat kFormat>
Status launch_rows(const SplitParams& params, const Launch& launch);

}  // namespace chiasma::sm90_sparse_fp8_direct
