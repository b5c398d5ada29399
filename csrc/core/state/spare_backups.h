#pragma once

#include <cstdint>

#include "core/budget/host_budget.h"
#include "core/memory/deferred_frees.h"
#include "core/registry/peer_access.h"
#include "core/registry/registry.h"

namespace ebbtide {

// The backups of resident content that no policy asks to keep (BackupRecord::is_spare): they spare the next pause a
// copy, and nothing is lost with them. So they go before a charge is refused for lack of host memory.
class SpareBackups final : public IdleMemory {
 public:
  SpareBackups(HostBudget& budget, Registry& registry, DeferredFrees& frees, PeerAccess& peers)
      : budget_(budget), registry_(registry), frees_(frees), peers_(peers) {
    budget_.set_spare(this);
  }
  SpareBackups(const SpareBackups&) = delete;
  SpareBackups& operator=(const SpareBackups&) = delete;
  ~SpareBackups() override { budget_.set_spare(nullptr); }

  // Those of tags that no operation holds; those of a step under way after its end. Nothing for a step: no backup goes
  // for copies ahead.
  bool give_way(uint64_t bytes) noexcept override;

 private:
  uint64_t drop(uint64_t bytes) noexcept;  // returns the bytes given back

  HostBudget& budget_;
  Registry& registry_;
  DeferredFrees& frees_;
  PeerAccess& peers_;
};

}  // namespace ebbtide
