#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "core/move/backups.h"
#include "core/move/move.h"
#include "core/transfer/block_scan.h"

namespace ebbtide {

// One step of copies ahead of a pause: copies used blocks of one tag that the backup lacks, with their digests. The
// next pause copies those that have changed since. A step is short, since frees and pauses meanwhile wait for its end.
// Kernels may write while it copies: then the digest, which is of the bytes in the store, is not that of the block.
class CopyAhead final : public Move {
 public:
  // request outlives it; its `ahead` says where to begin, and is set to where the next step begins once all has landed.
  CopyAhead(Core& core, const OperationRequest& request);
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return false; }
  void run_device(int device) override;
  void run_last() override;
  void settle() noexcept override;
  void count(Counters& counters, const ReportRow& total) const override;

 private:
  // Neighbouring blocks of an allocation that one chunk has.
  struct Part {
    BackupUse* use;
    const Chunk* chunk;
    size_t first_block;  // of the allocation
    size_t block_count;
    size_t first_scanned;                       // the number of its first block in the scan
    std::vector<CopyRange> ranges = {};         // of the chunk: to be copied
    std::vector<kernels::Digest> digests = {};  // of the chunk's blocks
    bool has_landed = false;
  };

  bool is_first_step() const;
  bool is_of_use(const Allocations& allocations);
  bool add(const std::shared_ptr<Allocation>& allocation);
  bool add_blocks(BackupUse& use, const Chunk& chunk);
  void borrow_engine();
  uint64_t ring_of_pause(int device) const;
  bool choose(Part& part);
  void land(Part& part);

  struct Window;  // the blocks that the step may read
  std::shared_ptr<Window> window_;
  AheadProgress reached_;  // where the next step begins
  std::deque<BackupUse> uses_;
  std::deque<Part> parts_;
  size_t scanned_blocks_ = 0;
  uint64_t fresh_bytes_ = 0;      // that are copied whatever the scan says
  uint64_t remaining_bytes_ = 0;  // that the step may still copy
  std::unique_ptr<EnginePool::Loan> engine_;
  std::unique_ptr<BlockScan> scan_;
};

}  // namespace ebbtide
