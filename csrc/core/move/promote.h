#pragma once

#include <map>
#include <memory>
#include <vector>

#include "core/operation/operation.h"

namespace ebbtide {

// device memory for as many host chunks as there is room for -> (devices are synchronised) -> copy all of them -> put each one's new memory behind its address.
//
// The new memory waits behind an address range of its own: a spare allocation, which ends with the host memory that was replaced, and is freed as any other is.
class PromotePart final : public OperationPart {
 public:
  using OperationPart::OperationPart;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return true; }
  std::vector<int> devices() const override;
  void run_device(int device) override;
  void settle() noexcept override;

 private:
  struct Moving {
    std::shared_ptr<Allocation> allocation;
    Chunk* chunk;
  };
  struct DevicePart {
    DeviceSet peers;
    std::vector<Moving> moving;
    std::shared_ptr<Allocation> spare;  // a chunk for each that moves, in order
  };

  void create_memory(int device, DevicePart& part);
  void copy(int device, DevicePart& part);
  void exchange(int device, DevicePart& part, size_t index);

  std::map<int, DevicePart> parts_;
};

}  // namespace ebbtide
