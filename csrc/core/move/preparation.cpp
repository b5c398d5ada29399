#include "core/move/preparation.h"

#include "core/transfer/block_scan.h"
#include "driver/device_kernels.h"

namespace ebbtide {

TagClaim Preparation::claim() const {
  return {
      .tags = request().tags,
      .concerns = [](const Allocation& allocation) { return !allocation.is_kept() && allocation.device_bytes() > 0; },
      .moves_memory = false};
}

void Preparation::prepare(const Allocations& allocations) {
  std::vector<BackupUse*> uses;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    const BackupKind kind = allocation->policy.backup;
    // An allocation that is partly away has a backup, and will go on with it.
    if (kind == BackupKind::kNone || allocation->is_away() || allocation->stored != nullptr) continue;
    BackupUse& use = opened_.emplace_back(BackupUse{.allocation = allocation});
    use.kind = kind;
    use.needed_bytes = allocation->size_bytes();
    uses.push_back(&use);
  }
  charge_backups(core(), uses, "the prepared backup of ");
  make_engines();
}

// The first pause of a process would wait for them: a ring to be pinned, kernels to be translated for the device.
void Preparation::make_engines() {
  struct DeviceNeed {
    policy::CopyNeed copy = copy_need(0, 0);
    size_t block_count = 0;
  };
  std::map<int, DeviceNeed> needs;
  for (const BackupUse& use : opened_) {
    DeviceNeed& need = needs[use.allocation->device];
    need.block_count += use.stored->blocks.size();
    need.copy.bytes += use.stored->kind == BackupKind::kPinned ? 0 : use.allocation->size_bytes();
    need.copy.has_files |= use.stored->kind == BackupKind::kDisk;
  }
  for (auto& [device, need] : needs) {
    need.copy.devices = static_cast<int>(needs.size());
    engines_.push_back(
        core().engines.borrow(device, need.copy, {.table_bytes = BlockScan::table_bytes(need.block_count)}));
    DeviceKernels::of(device);
  }
}

// The engines go back to the pool, which keeps them.
void Preparation::settle() noexcept {
  engines_.clear();
  opened_.clear();
}

void Preparation::run_last() {
  std::vector<std::shared_ptr<BackupRecord>> in_ram;
  for (BackupUse& use : opened_) {
    if (use.stored->kind != BackupKind::kRam) continue;
    use.stored->charge = std::move(use.charge);
    in_ram.push_back(use.stored);
  }
  if (!in_ram.empty()) populate_backups(in_ram, opened_.front().allocation->device);
  for (BackupUse& use : opened_) {
    attach_backup(core(), use);
    row(*use.allocation).bytes += use.stored->size_bytes();
  }
}

}  // namespace ebbtide
