#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/operation.h"

namespace ebbtide {

// claim host memory, open backups, make copiers -> (devices are synchronised) -> copy, and unmap and release each chunk as its bytes land -> drop the rest.
class PausePart final : public OperationPart {
 public:
  using OperationPart::OperationPart;
  // Instead of each allocation's policy, this once.
  void use_backup(std::optional<BackupKind> backup) { backup_ = backup; }

  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return true; }
  void run() override;
  void settle() noexcept override;

 private:
  // An allocation that keeps its content.
  struct Kept {
    std::shared_ptr<Allocation> allocation;
    std::shared_ptr<Stored> stored;  // what the allocation has, or a new one that it gets with its first chunk
    HostClaim claim;                 // for the pages that will be touched
    bool is_new = false;
  };
  struct Leaving {
    Allocation* allocation;
    Chunk* chunk;
    Kept* kept;
  };
  struct DevicePart {
    std::vector<Leaving> leaving;
    std::vector<CopyJob> jobs;  // parallel to leaving
    std::optional<StagingPool::Loan> ring;
    std::unique_ptr<Copier> copier;
  };

  BackupKind kind_of(const Allocation& allocation) const { return backup_.value_or(allocation.policy.backup); }
  uint64_t bytes_to_touch(const Allocation& allocation);
  HostClaim claim_host_memory(const Allocations& allocations);
  void keep(const std::shared_ptr<Allocation>& allocation, HostClaim claim);
  void make_copiers();
  void leave(const Leaving& leaving);
  void drop_rest();
  void forget_what_stayed(const Kept& kept) noexcept;

  std::optional<BackupKind> backup_;
  std::deque<Kept> kept_;
  std::map<int, DevicePart> parts_;  // by device
  std::vector<std::pair<Allocation*, Chunk*>> dropped_;
};

}  // namespace ebbtide
