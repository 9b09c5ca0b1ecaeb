// What one block of work (64 tokens for one query token and 64 heads) needs of a multiprocessor: the type that a
// kernel's budget.h is written in. Host code; `chiasma budget` divides by the measured ceilings.
#pragma once

namespace chiasma::tile {

// Units that work at the same time. Needs of one resource add up; a kernel that overlaps perfectly takes as long as the
// busiest.
enum class Resource { kMatrix, kShared, kConvert, kExchange, kExp2, kGather, kMemory };

struct Need {
  const char* stage;  // as the kernel's files are named
  Resource resource;
  double amount;        // in unit_of(resource); 0: the variant has no such need
  const char* ceiling;  // id of the figure (cuda/ceilings) that says how fast it can be
};

constexpr const char* name_of(Resource resource) {
  switch (resource) {
    case Resource::kMatrix: return "tensor cores";
    case Resource::kShared: return "shared memory";
    case Resource::kConvert: return "conversion";
    case Resource::kExchange: return "peer exchange";
    case Resource::kExp2: return "exp2";
    case Resource::kGather: return "gather";
    case Resource::kMemory: return "memory";
  }
  return "?";
}

constexpr const char* unit_of(Resource resource) {
  switch (resource) {
    case Resource::kMatrix: return "flop";
    case Resource::kConvert:
    case Resource::kExp2: return "values";
    case Resource::kShared:
    case Resource::kExchange:
    case Resource::kGather:
    case Resource::kMemory: return "B";
  }
  return "?";
}

}  // namespace chiasma::tile
