#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/move/move.h"
#include "core/transfer/block_scan.h"

namespace ebbtide {

// Moves chunks from the host to the device: creates device memory for as many chunks as there is room for, copies all
// of them, and puts the new memory behind their addresses.
//
// The new memory first lies behind an address range of its own, a spare allocation. In the end the spare allocation
// owns the replaced host memory, and is freed like any other.
class Promotion final : public Move {
 public:
  Promotion(Core& core, const OperationRequest& request) : Move(core), request_(request) {}
  OperationKind kind() const override { return OperationKind::kPromote; }
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return true; }
  std::vector<int> devices() const override;
  void run_device(int device) override;
  void settle() noexcept override;
  std::string note() const override { return note_; }
  void count(Counters& counters, const ReportRow& total) const override { counters.bytes_promoted += total.bytes; }

 private:
  struct Moving {
    std::shared_ptr<Allocation> allocation;
    Chunk* chunk;
  };
  struct DeviceWork {
    DeviceSet peers;
    std::vector<Moving> moving;
    std::shared_ptr<Allocation> spare;  // a chunk for each that moves, in order
    std::unique_ptr<EnginePool::Loan> engine;
    std::unique_ptr<BlockScan> scan;  // of the spare's blocks, in order; null where the host memory is not kept
  };

  void note_stop(int device, uint64_t chunk_bytes, uint64_t usable_bytes);
  void create_memory(int device, DeviceWork& work);
  void prepare_scan(int device, DeviceWork& work);
  void copy(int device, DeviceWork& work);
  void keep_host_memory(DeviceWork& work, size_t index) noexcept;
  void remap(int device, DeviceWork& work, size_t index);

  const OperationRequest& request_;
  std::map<int, DeviceWork> work_;
  std::string note_;  // where it stopped for lack of room
};

}  // namespace ebbtide
