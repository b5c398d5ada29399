#include "core/prepare.h"

namespace ebbtide {

void PreparePart::prepare(const Allocations& allocations) {
  uint64_t bytes = 0;
  for (const auto& allocation : allocations) {
    add_row(*allocation);
    const BackupKind kind = allocation->policy.backup;
    // What is partly away has a backup, and will go on with it.
    if (kind == BackupKind::kNone || allocation->is_away() || saver().registry.stored_of(*allocation) != nullptr)
      continue;
    ready_.push_back({allocation, open_backup(saver(), kind, allocation->size_bytes())});
    bytes += kind == BackupKind::kDisk ? 0 : allocation->size_bytes();
  }
  if (bytes == 0) return;
  HostClaim claim = saver().host_budget.claim(bytes, "the memory of the prepared backups");
  for (const Ready& ready : ready_) {
    if (ready.stored->kind != BackupKind::kDisk) ready.stored->claim = claim.split_promised(ready.stored->size_bytes());
  }
}

void PreparePart::run_last() {
  std::vector<std::shared_ptr<Stored>> in_memory;
  for (const Ready& ready : ready_) {
    if (ready.stored->kind != BackupKind::kDisk) in_memory.push_back(ready.stored);
  }
  if (!in_memory.empty()) populate_backups(in_memory, ready_.front().allocation->device);
  for (const Ready& ready : ready_) {
    saver().registry.set_stored(*ready.allocation, ready.stored);
    row(*ready.allocation).bytes += ready.stored->size_bytes();
  }
}

}  // namespace ebbtide
