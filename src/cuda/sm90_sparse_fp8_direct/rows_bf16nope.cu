#include "cuda/sm90_sparse_fp8_direct/launch_rows.cuh"

template chiasma::Status chiasma::sm90_sparse_fp8_direct::launch_rows<chiasma::KvFormat::bf16nope>(const SplitParams&,
                                                                                                   const Launch&);
