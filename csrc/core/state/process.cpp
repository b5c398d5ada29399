// How a process comes by its core. core.h declares all of this.
#include "core/state/core.h"

#include <atomic>
#include <cstdint>
#include <random>

#include "base/error.h"
#include "base/log.h"
#include "base/settings.h"
#include "core/state/core_settings.h"
#include "core/state/exit.h"
#include "store/disk_directory.h"

namespace ebbtide {
namespace {

std::atomic<Core*> made_core{nullptr};

// Different in every process, so that bytes whose digests collide can't be prepared.
kernels::Digest make_seed() {
  std::random_device source;
  const auto word = [&] { return (static_cast<uint64_t>(source()) << 32) ^ source(); };
  return {word(), word()};
}

}  // namespace

void require_not_forked() {
  if (!is_forked_child()) return;
  throw StateError(
      "ebbtide can't be used in a forked child of the process that used it: start workers with spawn or forkserver, or "
      "exec");
}

Core::Core() : digest_seed(make_seed()) {
  if (const auto path = read_variable(Setting::kLedger)) {
    try {
      budgets.host.join(Ledger::open(*path));
    } catch (const Error& error) {
      log_line(LogLevel::kError, {error.what(), "; this process counts its own host memory only"});
    }
  }
  read_core_settings(*this);
  say_malformed_variables();
  say_bad_disk_variable();
}

Core& Core::instance() {
  static Core* const core = [] {
    note_core_begun();
    auto* const made = new Core;
    summarize_at_exit(*made);
    made_core.store(made);
    return made;
  }();
  return *core;
}

Core* Core::instance_if_made() noexcept { return made_core.load(); }

}  // namespace ebbtide
