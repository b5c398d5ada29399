#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/move/backups.h"
#include "core/move/move.h"
#include "core/transfer/block_scan.h"
#include "store/copy.h"

namespace ebbtide {

// Takes allocations off the device. prepare(): charge host memory, open backups, borrow engines. run: scan the blocks,
// copy those that must move, and unmap and release each chunk as its bytes land. Chunks without a backup are dropped
// last.
class Pause : public Move {
 public:
  // kYes: drops the content of unused allocations, without pausing their tag.
  enum class Trim { kNo, kYes };
  // request outlives it.
  Pause(Core& core, const OperationRequest& request, Trim trim)
      : Move(core), request_(request), is_trim_(trim == Trim::kYes) {}
  OperationKind kind() const override { return is_trim_ ? OperationKind::kTrim : OperationKind::kPause; }
  TagClaim claim() const override;
  bool moves_content(const Allocation& allocation) const override;

  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return true; }
  std::vector<int> devices() const override;
  std::string note() const override { return note_; }
  void run_device(int device) override;
  void run_last() override;
  void settle() noexcept override;
  void count(Counters& counters, const ReportRow& total) const override;

  // Device memory that it will release, by device.
  std::map<int, uint64_t> leaving_bytes() const;

 protected:
  // Whether a resume at the same time waits for the memory, and shares the bus.
  virtual bool hands_over_memory() const { return false; }
  // Releases memory that can no longer be reached. The device is that of its address.
  virtual void release(int /*device*/, Backing& backing) { backing.release(); }

 private:
  // An allocation that keeps its content.
  struct Kept {
    std::shared_ptr<Allocation> allocation;
    std::shared_ptr<BackupRecord> stored;     // what the allocation has, or a new one that it gets with its first chunk
    HostCharge charge;                        // for the pages that will be touched
    std::vector<bool> is_unused;              // by block
    std::shared_ptr<const Verdicts> earlier;  // of the last pause, or null
    std::shared_ptr<Verdicts> verdicts;       // of this pause
    bool had_backup = false;                  // before this pause
    bool is_attached = false;
  };
  struct Judged {
    std::shared_ptr<Allocation> allocation;
    std::shared_ptr<Verdicts> verdicts;  // null: a trim
    bool is_unused = false;              // all of it, or it is trimmed
  };
  struct Noted {
    std::shared_ptr<Allocation> allocation;
    size_t resident_bytes;  // when it was noted
  };
  struct Leaving {
    Allocation* allocation;
    Chunk* chunk;
    Kept* kept;
    size_t departure;               // of the work's departures
    size_t first_scanned;           // the number of its first block in the scan
    std::vector<CopyRange> ranges;  // what must be copied
    bool is_followed = false;       // by its second look, behind its copy
  };
  // Chunks that leave together, since they share one handle.
  struct Departure {
    Backing* backing;
    std::vector<size_t> leaving = {};  // of the work's leaving, or none
    std::vector<std::pair<Allocation*, Chunk*>> chunks = {};
    size_t missing = 0;  // whose bytes have not landed
  };
  struct DeviceWork {
    std::vector<Leaving> leaving;
    std::vector<Departure> departures;  // of those that keep their content
    std::vector<Departure> dropped;
    bool has_dropped = false;
    std::unique_ptr<EnginePool::Loan> engine;
    std::unique_ptr<BlockScan> scan;
    bool expects_change = false;  // of all that leaves: its copies do not wait until the scan is read
  };

  BackupKind kind_of(const Allocation& allocation) const;
  std::shared_ptr<BackupRecord> usable_backup(const Allocation& allocation, BackupKind kind);
  void select(const std::shared_ptr<Allocation>& allocation);
  void attach(const Allocation& allocation, Chunk& chunk);
  void leave_what_others_share();
  uint64_t bytes_to_touch(const Kept& kept) const;
  void charge_host_memory();
  void open_backups();
  void pin_kept_backups();
  void reclaim(const Kept& kept);
  void borrow_engine(int device, DeviceWork& work);
  void note_blindness(int device, size_t scanned_blocks);

  void move_out(DeviceWork& work);
  bool expects_change(const DeviceWork& work);
  static bool changed_last_time(const Leaving& leaving);
  void decide(DeviceWork& work, Leaving& leaving);
  void submit(DeviceWork& work, Copy& copy, Leaving& leaving);
  std::shared_ptr<Verdicts> begin_verdicts(const Allocation& allocation);
  static void judge_whole(const Judged& judged, const Chunk& chunk, Verdict verdict);
  void keep_verdicts_of_what_stayed(const Judged& judged) noexcept;
  Verdict judge(Kept& kept, size_t block, const kernels::BlockReport* report);
  void land(DeviceWork& work, Leaving& leaving);
  void leave(DeviceWork& work, Departure& departure);
  bool keeps_digests(const DeviceWork& work, const Leaving& leaving);
  void note_digests(DeviceWork& work, const Leaving& leaving);
  void release_memory(const Departure& departure);
  void drop(DeviceWork& work);
  void forget_what_is_away() noexcept;
  void forget_what_stayed(const Kept& kept) noexcept;
  void note_paused() noexcept;
  void note_what_was_left(const Allocation& allocation) noexcept;

  const OperationRequest& request_;
  const bool is_trim_;
  std::vector<std::shared_ptr<Allocation>> chosen_;  // all
  std::vector<Noted> noted_;                         // as moved, by this pause
  std::deque<Judged> judged_;                        // all
  std::deque<Kept> kept_;
  std::map<const Backing*, size_t> departure_of_;  // in the departures, or in what is dropped, of its device
  std::map<int, DeviceWork> work_;
  std::string note_;  // why nothing could be recognised as unchanged
};

}  // namespace ebbtide
