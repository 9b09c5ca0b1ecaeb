#include "cpu/threads.h"

#include <omp.h>
#include <pthread.h>

#include <atomic>

namespace chiasma::cpu {
namespace {

std::atomic<bool> is_forked{false};

// When the library is loaded. It may fail for want of memory; a fork is then as dangerous as without it.
[[maybe_unused]] const int kRegistered =
    pthread_atfork(nullptr, nullptr, [] { is_forked.store(true, std::memory_order_relaxed); });

}  // namespace

int team_size(int wanted) {
  return is_forked.load(std::memory_order_relaxed) ? 1 : wanted;
}

int available_threads() {
  return team_size(omp_get_max_threads());
}

}  // namespace chiasma::cpu
