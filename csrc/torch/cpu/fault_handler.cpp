// Everything that runs in the handler is async-signal-safe: write(2), poll(2), sigaction(2), raise(3), and
// ebbtide_find_in_handler, which touches no lock.
#include "torch/cpu/fault_handler.h"

#include <poll.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "api/ebbtide.h"

namespace ebbtide::cpu {

namespace {

struct sigaction previous_segv, previous_bus;

// Several threads of one op may fault at once, and the process is about to end. One of them writes the line; the others
// wait until it is written.
enum class Telling : int { kNothing, kWriting, kDone };
std::atomic<Telling> telling{Telling::kNothing};
static_assert(std::atomic<Telling>::is_always_lock_free);
constexpr int kMaxWaits = 200;  // one millisecond each

std::atomic<bool> is_checked{false};
static_assert(std::atomic<bool>::is_always_lock_free);

struct sigaction& previous_of(int signal_number) { return signal_number == SIGBUS ? previous_bus : previous_segv; }

class Line {
 public:
  void add(const char* text) {
    while (*text != '\0' && length_ < sizeof(text_)) text_[length_++] = *text++;
  }
  void add_address(uintptr_t value) {
    add("0x");
    bool has_begun = false;
    for (int shift = 60; shift >= 0; shift -= 4) {
      const char digit[2] = {"0123456789abcdef"[(value >> shift) & 15], '\0'};
      has_begun = has_begun || digit[0] != '0' || shift == 0;
      if (has_begun) add(digit);
    }
  }
  void write_out() const {
    size_t done = 0;
    while (done < length_) {
      const ssize_t count = write(STDERR_FILENO, text_ + done, length_ - done);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return;
      done += static_cast<size_t>(count);
    }
  }

 private:
  char text_[1024];
  size_t length_ = 0;
};

// The address of the fault. A handler that was installed after this one (that of faulthandler, for example) may raise
// the signal again when it is done. Such a signal carries no address, but the kernel keeps the thread's last fault
// address.
uintptr_t fault_address(const siginfo_t* info, const void* context) {
  if (info->si_code > 0) return reinterpret_cast<uintptr_t>(info->si_addr);
  if (info->si_code != SI_TKILL || info->si_pid != getpid()) return 0;
  const auto* machine = &static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return static_cast<uintptr_t>(machine->gregs[REG_CR2]);
#elif defined(__aarch64__)
  return static_cast<uintptr_t>(machine->fault_address);
#else
  (void)machine;
  return 0;
#endif
}

void report(int signal_number, uintptr_t address) {
  char tag[EBBTIDE_TAG_MAX + 1] = {0};
  bool is_away = false;
  if (address == 0 || !ebbtide_find_in_handler(reinterpret_cast<const void*>(address), tag, sizeof(tag), &is_away) ||
      !is_away)
    return;
  Telling before = Telling::kNothing;
  if (!telling.compare_exchange_strong(before, Telling::kWriting)) {
    for (int i = 0; i < kMaxWaits && telling.load() == Telling::kWriting; ++i) poll(nullptr, 0, 1);
    return;
  }
  Line line;
  line.add("ebbtide: ");
  line.add(signal_number == SIGBUS ? "SIGBUS" : "SIGSEGV");
  line.add(" at ");
  line.add_address(address);
  line.add(": this memory belongs to tag '");
  line.add(tag[0] != '\0' ? tag : "(unknown)");
  line.add("', which is paused. Resume the tag before anything touches its tensors; ");
  line.add(is_checked.load() ? "EBBTIDE_CHECK=1, which is on, cannot see what did (docs/errors.md lists such things).\n"
                             : "EBBTIDE_CHECK=1 names the op that does.\n");
  line.write_out();
  telling.store(Telling::kDone);
}

void chain(int signal_number, siginfo_t* info, void* context) {
  struct sigaction& previous = previous_of(signal_number);
  if ((previous.sa_flags & SA_SIGINFO) != 0) {
    previous.sa_sigaction(signal_number, info, context);
    return;
  }
  if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
    previous.sa_handler(signal_number);
    return;
  }
  if (previous.sa_handler == SIG_IGN && info->si_code <= 0) return;
  // Restores the default action. The instruction then runs again and faults again. A signal that was sent does not
  // recur, so it is raised again.
  struct sigaction standard = {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal_number, &standard, nullptr);
  if (info->si_code <= 0) raise(signal_number);
}

void handle(int signal_number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  report(signal_number, fault_address(info, context));
  errno = saved_errno;
  chain(signal_number, info, context);
}

bool install_for(int signal_number) {
  struct sigaction& previous = previous_of(signal_number);
  if (sigaction(signal_number, nullptr, &previous) != 0) return false;
  struct sigaction own = {};
  own.sa_sigaction = handle;
  own.sa_mask = previous.sa_mask;
  // Keeps what the previous handler was promised: its mask, and whether the signal may nest. An alternate stack is used
  // if the thread has one.
  own.sa_flags = SA_SIGINFO | SA_ONSTACK | (previous.sa_flags & (SA_NODEFER | SA_RESTART));
  return sigaction(signal_number, &own, nullptr) == 0;
}

}  // namespace

void say_ops_are_checked(bool are_checked) { is_checked.store(are_checked); }

bool install_fault_handler() {
  static std::mutex mutex;
  static bool is_installed = false;
  std::lock_guard<std::mutex> guard(mutex);
  if (!is_installed) is_installed = install_for(SIGSEGV) && install_for(SIGBUS);
  return is_installed;
}

}  // namespace ebbtide::cpu
