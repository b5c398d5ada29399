#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/move/move.h"

namespace ebbtide {

// device memory for as many host chunks as there is room for -> (devices are synchronised) -> copy all of them -> put each one's new memory behind its address.
//
// The new memory waits behind an address range of its own: a spare allocation, which ends with the host memory that was replaced, and is freed as any other is.
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
  };

  void create_memory(int device, DeviceWork& work);
  void copy(int device, DeviceWork& work);
  void remap(int device, DeviceWork& work, size_t index);

  const OperationRequest& request_;
  std::map<int, DeviceWork> work_;
};

}  // namespace ebbtide
