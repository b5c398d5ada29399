#include "core/state/exit.h"

#include <errno.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>

#include "base/bytes.h"
#include "base/log.h"
#include "base/settings.h"
#include "core/state/core.h"

namespace ebbtide {
namespace {

std::atomic<const Core*> summarized{nullptr};

std::string peaks_of(const Core& core) {
  std::string peaks;
  for (int device = 0; device < kMaxDevices; ++device) {
    const uint64_t bytes = core.budgets.device.peak_bytes(device);
    if (bytes > 0) peaks += (peaks.empty() ? "" : ", ") + format_bytes(bytes) + " on device " + std::to_string(device);
  }
  return peaks.empty() ? "no device memory" : "at most " + peaks;
}

void write_summary(const Core& core) {
  try {
    const Counters& counters = core.counters;
    const std::string spilled =
        counters.spills == 0 ? "nothing overflowed to the host"
                             : format_bytes(counters.bytes_spilled) + " of " + std::to_string(counters.spills.load()) +
                                   (counters.spills == 1 ? " allocation" : " allocations") + " went to the host, " +
                                   format_bytes(counters.bytes_promoted) + " were promoted";
    write_summary_line(peaks_of(core) + "; " + spilled);
  } catch (...) {
    // No memory for the text: the process ends anyway.
  }
}

void run_at_exit() {
  if (is_forked_child()) return;
  BackgroundWork::wait_for_all();
  if (const Core* const core = summarized.exchange(nullptr)) write_summary(*core);
}

// Leaked on purpose: threads may outlive static destructors.
struct Running {
  std::mutex mutex;
  std::condition_variable changed;
  int count = 0;
};

// Exit handlers run in reverse order. By the first background work the driver is loaded and has registered its own, so
// that ours runs before it.
Running& running() {
  static auto* const state = [] {
    std::atexit(&run_at_exit);
    return new Running;
  }();
  return *state;
}

}  // namespace

void summarize_at_exit(const Core& core) {
  if (!read_switch(Setting::kSummary, false)) return;
  summarized.store(&core);
  std::atexit(&run_at_exit);
}

void write_summary_line(const std::string& text) {
  // Asked for: not held back by EBBTIDE_LOG.
  log_line(LogLevel::kError,
           {"summary of ", program_invocation_short_name, " (PID ", std::to_string(::getpid()), "): ", text});
}

void BackgroundWork::change(int by) noexcept {
  Running& all = running();
  const std::lock_guard lock(all.mutex);
  all.count += by;
  all.changed.notify_all();
}

void BackgroundWork::wait_for_all() noexcept {
  Running& all = running();
  std::unique_lock lock(all.mutex);
  all.changed.wait(lock, [&] { return all.count == 0; });
}

}  // namespace ebbtide
