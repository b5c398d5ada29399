#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/transfer/engine_pool.h"
#include "driver/device_kernels.h"
#include "kernels/blocks.h"

namespace ebbtide {

// Digests blocks of device memory with a kernel, in groups, so that the first results are there while the rest is still
// being read.
class BlockScan {
 public:
  // Null where the device can't run the kernels: then every block counts as changed. loan outlives the scan.
  // later_block_count: of a later scan by the same engine, for which it takes the table now.
  static std::unique_ptr<BlockScan> create(EnginePool::Loan& loan, size_t block_count, kernels::Digest seed,
                                           size_t later_block_count = 0);
  // Of the table that a scan of so many blocks takes from its loan.
  static uint64_t table_bytes(size_t block_count);
  BlockScan(const BlockScan&) = delete;
  BlockScan& operator=(const BlockScan&) = delete;
  // Waits for its kernels, which write into memory that others get next.
  ~BlockScan();

  // Adds the blocks of a range on the device. Returns the number of the first one.
  size_t add(CUdeviceptr address, size_t size_bytes);
  // Whether the first results are there when all are.
  bool is_short() const;
  // Starts the scan of everything that was added. Once.
  void launch() { launch(engine_.side_stream()); }
  // The same in the stream of copies, which copy the scanned blocks.
  void launch_before_copies() { launch(engine_.stream()); }
  // The result for a block, by its number. Waits for it.
  const kernels::BlockReport& report(size_t number);

  // Scans count blocks from first on again, and waits. The results are valid until the next call.
  const kernels::BlockReport* look_again(size_t first, size_t count);
  // The same in two parts: the first queues it behind the copies in their stream, in the context of the device. The
  // caller waits for that stream before the second, and in any case before the scan goes.
  void queue_second_look(size_t first, size_t count);
  const kernels::BlockReport* second_look(size_t first, size_t count);

 private:
  struct Group {
    size_t first;
    size_t end;
    Event done;
    bool is_done = false;
  };
  BlockScan(CopyEngine& engine, const DeviceKernels& kernels, std::byte* table, size_t capacity, kernels::Digest seed);
  void launch(const Stream& stream);
  void wait_for(const Stream& stream) noexcept;
  void digest(const Stream& stream, size_t first, size_t count, kernels::BlockReport* reports,
              kernels::BlockReport* sections) const;
  void join(size_t first, size_t count, kernels::BlockReport* reports, const kernels::BlockReport* sections) const;

  CopyEngine& engine_;
  const DeviceKernels& kernels_;
  const size_t capacity_;
  const kernels::Digest seed_;
  uint64_t* const addresses_;
  kernels::BlockReport* const reports_;
  kernels::BlockReport* const second_reports_;
  // Of few blocks, whose sections are digested apart; else null.
  kernels::BlockReport* const sections_;
  kernels::BlockReport* const second_sections_;
  size_t count_ = 0;
  std::vector<Group> groups_;
  const Stream* may_run_in_ = nullptr;  // the first look
  bool may_look_again_ = false;
};

}  // namespace ebbtide
