#include "cli/real_activations.h"

// The assembler copies the file in; a byte array in a source file would take the compiler minutes. The build passes the
// path.
asm(R"(
    .pushsection .rodata
    .globl chiasma_real_activations_begin
    .hidden chiasma_real_activations_begin
    .globl chiasma_real_activations_end
    .hidden chiasma_real_activations_end
    .balign 64
chiasma_real_activations_begin:
    .incbin ")" CHIASMA_REAL_ACTIVATIONS_FILE R"("
chiasma_real_activations_end:
    .popsection
)");

extern "C" {
extern const std::byte chiasma_real_activations_begin[];
extern const std::byte chiasma_real_activations_end[];
}

namespace chiasma::cli {

std::span<const std::byte> real_activations() {
  return {chiasma_real_activations_begin, chiasma_real_activations_end};
}

}  // namespace chiasma::cli
