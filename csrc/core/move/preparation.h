#pragma once

#include <deque>
#include <vector>

#include "core/move/backups.h"
#include "core/move/move.h"

namespace ebbtide {

// Opens a backup for every allocation without one and takes its memory, so that the next pause waits for no page. Also
// makes the copy engines and kernels, where there are none yet. Moves nothing.
class Preparation final : public Move {
 public:
  Preparation(Core& core, const OperationRequest& request) : Move(core, request, OperationKind::kPrepare) {}
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return false; }
  void run_device(int /*device*/) override {}
  void run_last() override;
  void settle() noexcept override;

 private:
  void make_engines();

  std::deque<BackupUse> opened_;
  std::vector<EnginePool::Loan> engines_;
};

}  // namespace ebbtide
