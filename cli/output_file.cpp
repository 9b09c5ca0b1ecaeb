#include "cli/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <system_error>

namespace chiasma::cli {
namespace {

// What an interrupt has to remove. The path belongs to the OutputFile that is being written; one at a time is enough
// for this program.
std::atomic<const char*> pending_temporary{nullptr};
static_assert(std::atomic<const char*>::is_always_lock_free, "a signal handler reads it");

// Signals that end the program at any moment and that somebody may send on purpose, or by closing a pipe.
constexpr int kInterrupts[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE, SIGXCPU};

extern "C" void remove_pending_and_die(int signal_number) {
  remove_unfinished_output();
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

void install_interrupt_handlers() {
  for (const int signal_number : kInterrupts) {
    // An ignored signal (nohup) stays ignored.
    if (std::signal(signal_number, remove_pending_and_die) == SIG_IGN) std::signal(signal_number, SIG_IGN);
  }
  // Past a file size limit write() shall fail rather than kill.
  std::signal(SIGXFSZ, SIG_IGN);
}

// Interrupts wait while it lives, so that none comes between making a file and knowing its name.
class InterruptsWait {
 public:
  InterruptsWait() {
    sigset_t interrupts;
    sigemptyset(&interrupts);
    for (const int signal_number : kInterrupts) sigaddset(&interrupts, signal_number);
    pthread_sigmask(SIG_BLOCK, &interrupts, &before_);
  }
  ~InterruptsWait() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  InterruptsWait(const InterruptsWait&) = delete;
  InterruptsWait& operator=(const InterruptsWait&) = delete;

 private:
  sigset_t before_{};
};

std::string reason(int error) {
  return std::generic_category().message(error);
}

mode_t default_file_mode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

}  // namespace

void remove_unfinished_output() noexcept {
  if (const char* path = pending_temporary.load()) unlink(path);
}

OutputFile::OutputFile(const std::string& path) : path_(path), target_(path) {
  namespace fs = std::filesystem;
  std::error_code error;
  constexpr int kMaxLinks = 40;
  for (int link = 0; link < kMaxLinks && fs::is_symlink(target_, error); ++link) {
    target_ = (fs::path(target_).parent_path() / fs::read_symlink(target_, error)).string();
  }
  if (fs::exists(target_, error) && !fs::is_regular_file(target_, error)) {
    throw OutputError(path + ": cannot be written: it exists and is not a regular file");
  }
  if (path.empty() || fs::path(target_).filename().empty()) throw OutputError("'" + path + "': not a file name");
  temporary_ = (fs::path(target_).parent_path() / ".chiasma-XXXXXX").string();
  install_interrupt_handlers();
  const InterruptsWait wait;
  descriptor_ = mkostemp(temporary_.data(), O_CLOEXEC);
  if (descriptor_ < 0) fail("cannot be written");
  pending_temporary = temporary_.c_str();
}

OutputFile::~OutputFile() {
  if (descriptor_ < 0) return;
  close(descriptor_);
  unlink(temporary_.c_str());
  pending_temporary = nullptr;
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(descriptor_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    // Of a mapped input, bytes that have gone meanwhile.
    if (written < 0 && errno == EFAULT) {
      throw OutputError(path_ + ": writing failed: the input file became shorter while it was read");
    }
    if (written < 0) fail("writing failed");
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

void OutputFile::commit() {
  // Temporary files are private to their owner; outputs have the permissions of any newly made file.
  if (fchmod(descriptor_, default_file_mode()) != 0) fail("writing failed");
  if (fsync(descriptor_) != 0) fail("writing failed");
  if (std::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be replaced");
  pending_temporary = nullptr;
  close(descriptor_);
  descriptor_ = -1;
}

void OutputFile::fail(const std::string& action) const {
  throw OutputError(path_ + ": " + action + ": " + reason(errno));
}

}  // namespace chiasma::cli
