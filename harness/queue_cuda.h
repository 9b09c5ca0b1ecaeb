// Between device_cuda.cpp and queue_cuda.cu.
#pragma once

#include <memory>

#include "harness/queue.h"

namespace chiasma::harness {

std::unique_ptr<Queue> open_cuda_queue(int device);

}  // namespace chiasma::harness
