#include "core/state/summary.h"

#include <atomic>
#include <cstdlib>

#include "base/bytes.h"
#include "base/log.h"
#include "base/settings.h"
#include "core/state/saver.h"

namespace ebbtide {
namespace {

std::atomic<const Saver*> summarised{nullptr};

void write_summary() {
  const Saver* saver = summarised.load();
  if (saver == nullptr || is_forked_child()) return;
  try {
    const Counters& counters = saver->counters;
    // Asked for: not held back by EBBTIDE_LOG.
    if (counters.spills == 0) return log_line(LogLevel::kError, {"summary: nothing went to the host"});
    log_line(LogLevel::kError,
             {"summary: ", format_bytes(counters.bytes_spilled), " of ", std::to_string(counters.spills.load()),
              " allocations went to the host, ", format_bytes(counters.bytes_promoted), " were promoted"});
  } catch (...) {
    // No memory for the text: the process ends anyway.
  }
}

}  // namespace

void summarise_at_exit(const Saver& saver) {
  if (!read_switch(Setting::kSummary, false)) return;
  summarised.store(&saver);
  std::atexit(&write_summary);
}

}  // namespace ebbtide
