#include "core/pause/trim.h"

namespace ebbtide {

TagClaim Trim::claim() const {
  // Of named allocations, those that are away lose no memory.
  const bool is_named = !request().tags.addresses.empty();
  return {.tags = request().tags,
          .concerns = [](const Allocation& allocation) { return allocation.wants_trim(); },
          .leases = is_named ? TagClaim::Leases::kRefusedWhereMemoryIs : TagClaim::Leases::kRefused,
          .marks_trimmed = true};
}

void Trim::prepare(const Allocations& allocations) {
  allocations_ = allocations;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.backing->has_memory()) add_to_handle(dropped_[allocation->device], {allocation.get(), &chunk});
    }
  }
  for (auto& [device, handles] : dropped_) {
    // Of allocations that were named one by one, memory that others share stays.
    if (!request().tags.addresses.empty()) std::erase_if(handles, has_others);
    // Nothing on the device uses content that is away.
    if (!handles.empty()) add_device(device);
  }
}

void Trim::run_last() {
  for (const auto& allocation : allocations_) {
    if (!allocation->is_any_stored()) continue;
    note_released();
    for (Chunk& chunk : allocation->chunks) {
      if (chunk.place.load() == Place::kStored) chunk.place.store(Place::kDropped, std::memory_order_release);
    }
    // An open view keeps the bytes.
    core().registry.replace(allocation->stored, nullptr);
  }
  drop_all();
  for (const auto& allocation : allocations_) {
    allocation->is_paused.store(false);
    allocation->is_unused = true;
  }
}

void Trim::settle() noexcept {
  for (const auto& allocation : allocations_) {
    forget_backup_if_dropped(*allocation);
    if (allocation->is_paused.load() || allocation->is_away()) core().registry.replace(allocation->verdicts, nullptr);
  }
  dropped_.clear();
  allocations_.clear();
}

}  // namespace ebbtide
