#include "core/state/spare_backups.h"

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "base/log.h"

namespace ebbtide {
namespace {

bool is_spare(const Allocation& allocation) {
  const BackupRecord* const stored = allocation.stored.get();
  return stored != nullptr && stored->is_spare && !stored->is_looked_at() && stored->charge.size_bytes() > 0 &&
         !allocation.is_away() && !allocation.is_paused.load();
}

}  // namespace

bool SpareBackups::give_way(uint64_t bytes) noexcept {
  if (registry_.ahead_steps.is_in_one()) return false;
  uint64_t given = drop(bytes);
  if (given < bytes && registry_.ahead_steps.wait(AheadSteps::Which::kAll)) given += drop(bytes - given);
  return given > 0;
}

uint64_t SpareBackups::drop(uint64_t bytes) noexcept {
  uint64_t given = 0;
  const uint64_t peer_generation = peers_.generation();
  try {
    Selection selection = registry_.claim_idle([&](const Allocation& allocation) {
      if (given >= bytes || !is_spare(allocation)) return false;
      given += allocation.stored->charge.size_bytes();
      return true;
    });
    for (const auto& allocation : selection.groups.front().allocations) {
      auto stored = allocation->stored;
      registry_.replace(allocation->stored, nullptr);
      frees_.let_go(std::move(stored));
    }
    frees_.destroy_all(registry_.release(selection, Outcome::kUntouched));
    peers_.catch_up_after_hold(peer_generation);
  } catch (const std::exception& error) {
    // Too little memory to look for them: nothing is held.
    log_line(LogLevel::kInfo, {"copies ahead of a pause gave no memory back: ", error.what()});
    return 0;
  }
  return given;
}

}  // namespace ebbtide
