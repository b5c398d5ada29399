#include "core/move/preparation.h"

#include "core/transfer/block_scan.h"
#include "driver/device_kernels.h"

namespace ebbtide {

TagClaim Preparation::claim() const {
  return {.tags = request_.tags,
          .concerns = [](const Allocation& allocation) { return allocation.device_bytes() > 0; },
          .moves_memory = false};
}

void Preparation::prepare(const Allocations& allocations) {
  uint64_t bytes = 0;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    const BackupKind kind = allocation->policy.backup;
    // What is partly away has a backup, and will go on with it.
    if (kind == BackupKind::kNone || allocation->is_away() || core().registry.backup_of(*allocation) != nullptr)
      continue;
    ready_.push_back({allocation, open_backup(core(), kind, *allocation)});
    bytes += kind == BackupKind::kDisk ? 0 : allocation->size_bytes();
  }
  if (bytes > 0) {
    HostCharge charge = core().budgets.host.charge(bytes, "the memory of the prepared backups");
    BackupHolders holders(core());
    for (const Ready& ready : ready_) {
      if (ready.stored->kind == BackupKind::kDisk) continue;
      ready.stored->charge = charge.split_promised(ready.stored->size_bytes());
      ready.stored->charge.hold_for(holders.of(*ready.allocation->tag));
    }
  }
  make_engines();
}

// The first pause of a process would wait for them: a ring to be pinned, kernels to be translated for the device.
void Preparation::make_engines() {
  std::map<int, policy::CopyNeed> needs;
  std::map<int, size_t> block_counts;
  for (const Ready& ready : ready_) {
    block_counts[ready.allocation->device] += ready.allocation->size_bytes() / kernels::kBlockBytes;
    policy::CopyNeed& need = needs.try_emplace(ready.allocation->device, copy_need(0, 0)).first->second;
    need.bytes += ready.stored->kind == BackupKind::kPinned ? 0 : ready.allocation->size_bytes();
    need.has_files |= ready.stored->kind == BackupKind::kDisk;
  }
  for (auto& [device, need] : needs) {
    need.devices = static_cast<int>(needs.size());
    const uint64_t table_bytes = BlockScan::table_bytes(block_counts.at(device));
    engines_.push_back(core().engines.borrow(device, need, {.table_bytes = table_bytes}));
    DeviceKernels::of(device);
  }
}

// The engines go back to the pool, which keeps them.
void Preparation::settle() noexcept {
  engines_.clear();
  ready_.clear();
}

void Preparation::run_last() {
  std::vector<std::shared_ptr<BackupRecord>> in_memory;
  for (const Ready& ready : ready_) {
    if (ready.stored->kind != BackupKind::kDisk) in_memory.push_back(ready.stored);
  }
  if (!in_memory.empty()) populate_backups(in_memory, ready_.front().allocation->device);
  for (const Ready& ready : ready_) {
    core().registry.set_backup(*ready.allocation, ready.stored);
    row(*ready.allocation).bytes += ready.stored->size_bytes();
  }
}

}  // namespace ebbtide
