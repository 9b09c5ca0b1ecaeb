// What this machine offers.
#pragma once

#include <cstdint>

#include "api/status.h"

namespace chiasma {

// OK, or why no CUDA device can be used.
Status cuda_available();
// The CPU and every usable CUDA device.
std::int32_t device_count();
Status query_device(std::int32_t number, chiasma_device_info* info);
// By identity instead of number.
Status query_device(chiasma_device device, chiasma_device_info* info);

}  // namespace chiasma
