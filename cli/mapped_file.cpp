#include "cli/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <system_error>

#include "cli/error.h"
#include "cli/output_file.h"
#include "cli/safetensors.h"

namespace chiasma::cli {
namespace {

constexpr const char* kBecameShorter = ": the file became shorter while it was read";

}  // namespace

// What the signal handler knows of a mapping. These are never freed, since a handler may be looking at them; a program
// that reads some files has some.
struct MappedFile::Watched {
  std::string message;
  std::atomic<std::uintptr_t> begin{0};  // 0: no longer mapped
  std::uintptr_t end = 0;
  Watched* next = nullptr;

  static inline std::atomic<Watched*> first{nullptr};

  static Watched* add(const std::string& path, const std::byte* address, std::size_t bytes) {
    auto* added = new Watched;
    added->message = "chiasma: " + path + kBecameShorter + "\n";
    added->end = reinterpret_cast<std::uintptr_t>(address) + bytes;
    added->begin = reinterpret_cast<std::uintptr_t>(address);
    added->next = first.load();
    while (!first.compare_exchange_weak(added->next, added)) {
    }
    return added;
  }

  static void on_bus_error(int signal_number, siginfo_t* info, void* /*context*/) {
    const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
    // The last byte of a mapping shares its page with bytes behind it.
    const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    for (const Watched* watched = first.load(); watched != nullptr; watched = watched->next) {
      const std::uintptr_t begin = watched->begin.load();
      if (begin == 0 || address < begin || address >= watched->end + page_bytes) continue;
      remove_unfinished_output();
      // Where nobody listens, the exit code still tells.
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, watched->message.data(), watched->message.size());
      _exit(kExitBadInput);
    }
    // Not ours: the instruction is repeated and does what it would have done.
    std::signal(signal_number, SIG_DFL);
  }

  static void install_handler() {
    struct sigaction action {};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(SIGBUS, &action, nullptr);
  }
};

namespace {

[[noreturn]] void fail_open(const std::string& path, int error) {
  const std::string message = path + ": cannot be read: " + std::generic_category().message(error);
  if (error == ENOMEM) throw CommandError(kExitUnavailable, message);
  throw SafetensorsError(message);
}

}  // namespace

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  std::shared_ptr<MappedFile> file(new MappedFile(path));
  // O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
  file->descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file->descriptor_ < 0) fail_open(path, errno);
  struct stat status {};
  if (fstat(file->descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) {
    throw SafetensorsError(path + ": cannot be read: it is not a regular file");
  }
  const auto bytes = static_cast<std::size_t>(status.st_size);
  if (bytes == 0) return file;
  void* address = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file->descriptor_, 0);
  if (address == MAP_FAILED) fail_open(path, errno);
  file->address_ = static_cast<const std::byte*>(address);
  file->bytes_ = bytes;
  Watched::install_handler();
  file->watched_ = Watched::add(path, file->address_, bytes);
  return file;
}

MappedFile::~MappedFile() {
  if (watched_ != nullptr) watched_->begin = 0;
  if (bytes_ != 0) munmap(const_cast<std::byte*>(address_), bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

void MappedFile::check_length() const {
  struct stat status {};
  if (fstat(descriptor_, &status) == 0 && static_cast<std::size_t>(status.st_size) >= bytes_) return;
  throw SafetensorsError(path_ + kBecameShorter);
}

void MappedFile::release(std::span<const std::byte> part) const {
  // Only whole pages, and only of this mapping: memory of another kind would lose its contents.
  if (part.empty() || part.data() < address_ || part.data() + part.size() > address_ + bytes_) return;
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(part.data()) / page_bytes * page_bytes;
  const auto end = reinterpret_cast<std::uintptr_t>(part.data() + part.size()) / page_bytes * page_bytes;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace chiasma::cli
