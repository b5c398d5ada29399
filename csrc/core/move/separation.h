#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/move/move.h"

namespace ebbtide {

// Runs before a trim. Where a named allocation shares a handle with one that is not named, each chunk gets a handle of
// its own, so that one can go without the other.
//
// Handles are separated one after the other, the smallest first: memory for all that share it is created, filled, and
// put behind the same addresses. Where the device has too little memory, the rest go on sharing.
class Separation final : public Move {
 public:
  Separation(Core& core, const OperationRequest& request) : Move(core), request_(request) {}
  OperationKind kind() const override { return OperationKind::kSeparate; }
  // Allocations that share memory with the named ones may be any of the tags'.
  TagClaim claim() const override;
  void prepare(const Allocations& allocations) override;
  bool takes_memory_away() const override { return true; }
  std::vector<int> devices() const override;
  void run_device(int device) override;
  void settle() noexcept override;

 private:
  struct Sharer {
    std::shared_ptr<Allocation> allocation;
    Chunk* chunk;
    CUdeviceptr address() const { return allocation->address() + chunk->offset; }
  };
  using Sharers = std::vector<Sharer>;  // of one handle

  static std::pair<uint64_t, CUdeviceptr> order_of(const Sharers& sharers);
  std::shared_ptr<Allocation> make_spare(int device, const Sharers& sharers);
  void copy(int device, const Sharers& sharers, Allocation& spare);
  void remap(int device, const Sharers& sharers, Allocation& spare);

  const OperationRequest& request_;
  std::map<int, std::vector<Sharers>> shared_;  // by device
};

}  // namespace ebbtide
