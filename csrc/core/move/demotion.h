#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/move/move.h"
#include "core/transfer/block_scan.h"

namespace ebbtide {

// Moves chunks from the device to the host, where the device still reaches them at the same addresses: takes host
// memory for as many chunks as the request allows, copies all of them, puts the host memory behind their addresses, and
// gives each handle of device memory back as its last chunk has gone.
//
// A chunk that has a twin goes there, and only its blocks that have changed are copied.
//
// The host memory first lies behind an address range of its own, a spare allocation. What fails is left to it, and
// freed like any other. Chunks that share a handle move together, each to memory of its own.
class Demotion final : public Move {
 public:
  Demotion(Core& core, const OperationRequest& request) : Move(core), request_(request) {}
  OperationKind kind() const override { return OperationKind::kDemote; }
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return true; }
  std::vector<int> devices() const override;
  void run_device(int device) override;
  void settle() noexcept override;
  void count(Counters& counters, const ReportRow& total) const override {
    counters.bytes_demoted += total.copied + total.clean;
  }

 private:
  struct Moving {
    std::shared_ptr<Allocation> allocation;
    Chunk* chunk;
    CUdeviceptr address() const { return allocation->address() + chunk->offset; }
  };
  struct Leaving {  // the chunks behind one handle
    std::vector<Moving> chunks;
    size_t first_spare = 0;  // theirs, in the spare allocation
  };
  struct DeviceWork {
    DeviceSet peers;
    std::vector<Leaving> leaving;
    // For each chunk, in order, one of the two, until it is mapped.
    std::vector<HostPool::Handle> memory;
    std::vector<HostTwin> twins;
    std::vector<uint64_t> clean_bytes;  // of each chunk: what the twin held already
    std::unique_ptr<EnginePool::Loan> engine;
    std::unique_ptr<BlockScan> scan;    // null: all counts as changed
    std::shared_ptr<Allocation> spare;  // a chunk for each, likewise
  };

  void select(const Allocations& allocations);
  void take_host_memory(int device, DeviceWork& work);
  void prepare_scan(int device, DeviceWork& work);
  std::vector<size_t> start_scan(DeviceWork& work);
  void copy(int device, DeviceWork& work);
  void remap(int device, DeviceWork& work, const Leaving& leaving);
  bool map_back(int device, const DeviceWork& work, Backing& backing, CUdeviceptr address) noexcept;

  const OperationRequest& request_;
  std::map<int, DeviceWork> work_;
};

}  // namespace ebbtide
