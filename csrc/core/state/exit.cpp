#include "core/state/exit.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>

#include "base/bytes.h"
#include "base/log.h"
#include "base/settings.h"
#include "core/state/core.h"

namespace ebbtide {
namespace {

std::atomic<const Core*> summarized{nullptr};

void write_summary(const Core& core) {
  try {
    const Counters& counters = core.counters;
    // Asked for: not held back by EBBTIDE_LOG.
    if (counters.spills == 0) return log_line(LogLevel::kError, {"summary: nothing went to the host"});
    log_line(LogLevel::kError,
             {"summary: ", format_bytes(counters.bytes_spilled), " of ", std::to_string(counters.spills.load()),
              " allocations went to the host, ", format_bytes(counters.bytes_promoted), " were promoted"});
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
