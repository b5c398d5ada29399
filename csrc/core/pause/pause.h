#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/pause/removal.h"
#include "core/transfer/block_scan.h"

namespace ebbtide {

// Without a backup: its content is dropped. A new backup is attached with the first chunk that leaves.
struct PausedAllocation : BackupUse {
  std::shared_ptr<const Verdicts> earlier;  // of the last pause, or null
  std::shared_ptr<Verdicts> verdicts;       // of this pause
  size_t noted_bytes = 0;                   // resident when it was noted in request.paused_set; 0: this pause did not
};

// Takes allocations off the device. prepare(): charge host memory, open backups, borrow engines. run: scan the blocks,
// copy those that must move, and unmap and release each handle as its bytes land. Chunks without a backup are dropped
// last.
class Pause : public Removal {
 public:
  Pause(Core& core, const OperationRequest& request) : Removal(core, request, OperationKind::kPause) {}
  TagClaim claim() const override;
  bool moves_content(const Allocation& allocation) const override;

  void prepare(const Allocations& allocations) override;
  void run_device(int device) override;
  void run_last() override;
  void settle() noexcept override;
  void count(Counters& counters, const ReportRow& total) const override;

  // Device memory that it will release.
  uint64_t leaving_bytes(int device) const;

 protected:
  // Whether a resume at the same time waits for the memory, and shares the bus.
  virtual bool hands_over_memory() const { return false; }

 private:
  struct DeviceWork {
    Handles handles;  // of the chunks that keep their content
    std::unique_ptr<EnginePool::Loan> engine;
    std::unique_ptr<BlockScan> scan;
    bool expects_change = false;  // of all that leaves: its copies do not wait until the scan is read
  };

  BackupKind kind_of(const Allocation& allocation) const;
  std::shared_ptr<BackupRecord> usable_backup(const Allocation& allocation, BackupKind kind);
  void add(const std::shared_ptr<Allocation>& allocation);
  void select(PausedAllocation& paused);
  void attach(const Allocation& allocation, Chunk& chunk);
  void refuse_shared() const;
  void pin_backups();
  void borrow_engine(int device, DeviceWork& work);
  void explain_missing_scan(int device, size_t scanned_blocks);

  void move_out(DeviceWork& work);
  bool expects_change(const DeviceWork& work);
  void decide(DeviceWork& work, LeavingChunk& leaving);
  CopyJob job_of(DeviceWork& work, LeavingChunk& leaving);
  Verdict judge(PausedAllocation& paused, size_t block, const kernels::BlockReport* report);
  void land(DeviceWork& work, const LeavingChunk& leaving);
  void give_up(const LeavingHandle& handle);
  bool keeps_digests(const DeviceWork& work, const LeavingChunk& leaving);
  void note_digests(DeviceWork& work, const LeavingChunk& leaving);
  void note_host_chunks(const Allocation& allocation) noexcept;

  std::deque<PausedAllocation> paused_;
  std::vector<PausedAllocation*> stored_;  // of them, those that keep their content
  std::map<int, DeviceWork> work_;
};

}  // namespace ebbtide
