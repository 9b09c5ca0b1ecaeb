// examples/real_activations.safetensors, as part of the program: `chiasma demo` works wherever the program is.
#pragma once

#include <cstddef>
#include <span>

namespace chiasma::cli {

std::span<const std::byte> real_activations();

}  // namespace chiasma::cli
