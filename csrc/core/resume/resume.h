#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/move/move.h"
#include "core/resume/arrivals.h"
#include "core/transfer/engine_pool.h"
#include "driver/device_kernels.h"

namespace ebbtide {

// Brings allocations back. prepare() creates all physical memory, so that out-of-memory is known before a byte moves.
// run_device() maps it, and copies into the mapped part while it maps the rest. Memory without a backup reads as zeros.
// Neighbouring chunks share a handle: they become resident, and their backups are released, once all of them have
// arrived.
class Resume : public Move {
 public:
  // Both outlive it. tags: the selection to resume.
  Resume(Core& core, const OperationRequest& request, const TagRequest& tags)
      : Move(core, request, OperationKind::kResume), tags_(tags), must_poison_(core.rules.must_poison.load()) {}
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return false; }
  void run_device(int device) override;
  void run_last() override;
  void settle() noexcept override;
  void count(Counters& counters, const ReportRow& total) const override;

  // The handles that come back, by device, in the order in which they will be mapped.
  std::map<int, std::vector<HandleKind>> returning_handles() const;

  // After prepare(): maps everything in the calling thread and queues the copies in the background; then run_device()
  // waits until they have landed. Null, with nothing done, where a device can't be copied to in the background.
  std::unique_ptr<Arrivals> launch();

 protected:
  // Whether memory comes from a pause at the same time. Then it holds old bytes, it may have to be waited for, and the
  // bus is shared.
  virtual bool takes_over_memory() const { return false; }
  // Where it does: whether memory whose content was dropped must not show them.
  virtual bool hides_old_bytes() const { return true; }
  // Device memory for the next of returning_handles(), where prepare() has not created it.
  struct TakenMemory {
    DeviceCharge charge;
    PhysicalMemory memory;
    bool is_fresh = PhysicalMemory::is_made_clear();  // reads as zeros
  };
  virtual std::optional<TakenMemory> take_memory(int /*device*/, const HandleKind& /*kind*/) { return std::nullopt; }

 private:
  struct ResumedAllocation {
    std::shared_ptr<Allocation> allocation;
    std::shared_ptr<BackupRecord> stored;  // or null
    std::vector<bool> unused;              // by block: comes back as if it was dropped; empty: none does
    bool is_retained;                      // the store's bytes stay for the next pause
    bool is_spare;                         // the backup, once all is back
    bool was_stored;                       // some of it
  };
  struct ReturningChunk {
    const ResumedAllocation* of;
    Chunk* chunk;
    BackupRecord* stored;             // null for dropped or detached chunks
    bool is_dropped = false;          // nothing has its bytes
    bool is_on_host = false;          // where it goes
    bool has_fills = false;           // the device is writing into it, beside the copies
    size_t group = 0;                 // of the work's groups
    size_t delivered = 0;             // it is whole when so many pieces of the delivery have arrived
    std::vector<CopyRange> ranges{};  // to be copied; each of the others is one value

    const Allocation& allocation() const { return *of->allocation; }
    CUdeviceptr address() const { return allocation().address() + chunk->offset; }
  };
  // The chunks that come back behind one handle.
  struct Group {
    CUdeviceptr address = 0;
    uint64_t size_bytes = 0;
    bool is_on_host = false;   // where it goes
    bool is_detached = false;  // its bytes are in its memory: it is one chunk, that must be mapped and no more
    bool is_fresh = PhysicalMemory::is_made_clear();  // its memory reads as zeros, or has its bytes
    bool is_exportable = false;                       // other processes may have its memory; then it is one chunk
    std::shared_ptr<Backing> backing;                 // that of all its chunks
    std::vector<size_t> members;                      // of the work's returning, by address
    size_t missing = 0;                               // members that have not arrived

    bool wants_device_memory() const { return !is_on_host && !is_detached; }
    HandleKind kind() const { return {size_bytes, is_exportable}; }
  };
  struct DeviceWork {
    DeviceSet peers;
    uint64_t bytes = 0;  // of device memory
    uint64_t copied_bytes = 0;
    uint64_t staged_bytes = 0;              // of which through the ring
    bool has_files = false;                 // some of these
    size_t fill_count = 0;                  // blocks of one value that kernels write
    bool has_poison = false;                // some blocks are kPoison
    std::vector<ReturningChunk> returning;  // in the order in which they come
    std::vector<Group> groups;
    std::unique_ptr<EnginePool::Loan> engine;
    std::unique_ptr<Stream> clearing;     // in its place, where new memory is cleared and nothing else is to be done
    kernels::BlockFill* fills = nullptr;  // in the engine's table
    size_t fills_used = 0;
    bool is_filling = false;                  // something is queued on the engine's side stream
    std::vector<size_t> filled{};             // groups that have arrived but for that
    std::shared_ptr<Delivery> delivery;       // of a resume in the background
    std::optional<DeferredFrees::Hold> hold;  // from its launch on
    bool is_in_doubt = false;                 // queued work may still use memory that did not come back
  };

  void select(const std::shared_ptr<Allocation>& allocation);
  void add_ranges(DeviceWork& work, ReturningChunk& returning);
  std::vector<bool> forgotten_blocks(const Allocation& allocation, const BackupRecord* stored);
  StoredBlock block_of(const ReturningChunk& returning, size_t index) const;
  // Visits the ranges that are not copied: visit(offset, size_bytes, value) for each longest range of one value.
  template <typename Visit>
  void visit_values(const ReturningChunk& returning, const Visit& visit) const;
  void put_in_order(DeviceWork& work);
  void group(DeviceWork& work);
  static bool may_share(const ReturningChunk& one, const ReturningChunk& other);
  bool can_deliver() const;
  void try_create_memory(int device, DeviceWork& work);
  void create_memory(int device, DeviceWork& work);
  void create_memory_by_room(int device, DeviceWork& work);
  void create_host_memory(int device, DeviceWork& work);
  void borrow_engine(int device, DeviceWork& work);

  void map(int device, DeviceWork& work, Group& group);
  void fill(DeviceWork& work, ReturningChunk& returning);
  static const Stream& side_stream(DeviceWork& work);
  void set_bytes(DeviceWork& work, ReturningChunk& returning, size_t offset, size_t size_bytes, unsigned char value);
  void clear_now(DeviceWork& work);
  void abandon_fills(DeviceWork& work) noexcept;
  void arrive(DeviceWork& work, const ReturningChunk& returning);
  void end_fills(DeviceWork& work);
  void note_filled(DeviceWork& work);
  void note_arrivals(DeviceWork& work, const Group& group);
  void note_arrival(const Group& group, ReturningChunk& returning);
  void forget(ReturningChunk& returning);
  void plan_delivery(DeviceWork& work, ReturningChunk& returning);
  bool prepare_deliveries();
  void launch_delivery(int device, DeviceWork& work);
  void follow_delivery(DeviceWork& work);
  void take_fill_table(DeviceWork& work);
  void abandon_delivery(int device, DeviceWork& work) noexcept;
  void give_back_unused(DeviceWork& work) noexcept;

  const TagRequest& tags_;
  const bool must_poison_;  // dropped memory; else it reads as zeros
  std::deque<ResumedAllocation> resumed_;
  std::map<int, DeviceWork> work_;  // by device
};

template <typename Visit>
void Resume::visit_values(const ReturningChunk& returning, const Visit& visit) const {
  const Chunk& chunk = *returning.chunk;
  if (returning.stored == nullptr)
    return visit(0, chunk.size_bytes, must_poison_ && returning.is_dropped ? kPoison : kernels::Value{});
  for (size_t first = 0, end = 0; first < chunk.block_count(); first = end) {
    const StoredBlock block = block_of(returning, first);
    for (end = first + 1; end < chunk.block_count() && block.is_constant; ++end) {
      const StoredBlock next = block_of(returning, end);
      if (!next.is_constant || next.value != block.value) break;
    }
    if (block.is_constant) visit(first * kernels::kBlockBytes, (end - first) * kernels::kBlockBytes, block.value);
  }
}

}  // namespace ebbtide
