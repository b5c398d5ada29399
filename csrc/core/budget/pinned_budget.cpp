#include "core/budget/pinned_budget.h"

#include "base/error.h"
#include "base/settings.h"

namespace ebbtide {

PinnedCharge PinnedBudget::charge(uint64_t size_bytes, const std::string& purpose) {
  const uint64_t limit = limit_bytes();
  uint64_t held = held_bytes_.load();
  do {
    const uint64_t room = saturating_subtract(limit, held);
    if (size_bytes > room) {
      throw StoreError(purpose + " needs " + format_bytes(size_bytes) + " of pinned memory; " + format_bytes(room) +
                           " are left of pinned_limit " + format_bytes(limit) + " (" +
                           source_of(Setting::kPinnedLimit) + "). Raise " + how_to_change(Setting::kPinnedLimit) +
                           ", or keep less in pinned backups",
                       {size_bytes, room, limit}, Cause::kPinnedLimit);
    }
  } while (!held_bytes_.compare_exchange_weak(held, held + size_bytes));
  return {*this, {size_bytes}};
}

}  // namespace ebbtide
