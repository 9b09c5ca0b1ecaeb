// The text of cases/smoke.cases, part of the program so that `verify` works anywhere.
#pragma once

namespace chiasma::harness {

extern const char* const kSmokeCases;

}  // namespace chiasma::harness
