#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/budget/host_budget.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

struct Chunk;

// Host memory for chunks that the device reaches. Making it takes long (4.7 GB/s: csrc/DESIGN.md, F13), so as much as the capacity says is kept for the next spill. What is kept reads as
// zeros and nobody maps it; it stays in the host budget, and gives way to whatever else that budget has no room for.
class HostPool final : public IdleMemory {
 public:
  explicit HostPool(HostBudget& budget) : budget_(budget) { budget_.set_idle(this); }
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  ~HostPool() override { budget_.set_idle(nullptr); }

  struct Piece {
    HostClaim claim;
    PhysicalMemory memory;
  };
  // Pieces of these sizes for a device, reading as zeros: kept ones, else new ones. All or nothing. Throws StoreError where the budget or the host has too little, and where the driver makes no
  // such memory; DriverError. purpose: "tag 'weights'".
  std::vector<Piece> take(int device, const std::vector<uint64_t>& sizes, const std::string& purpose);
  // Pieces that were taken and never mapped.
  void put_back(int device, std::vector<Piece> pieces) noexcept;

  // Takes over the memory behind a host chunk, whose address this is: keeps it, cleared, or gives it to the system. Nothing on the device, which is current, uses it any more, and no capture is
  // under way. Throws DriverError; what was done by then stays done, and Backing::give_up() finishes it.
  void recycle(int device, CUdeviceptr address, Chunk& chunk);

  // Makes what the capacity allows and is not there yet. Throws as take() does; what was made by then stays.
  void fill(int device);
  // What is beyond it goes to the system. Throws InvalidArgument where the machine has less RAM.
  void set_capacity(uint64_t bytes);
  uint64_t capacity_bytes() const { return capacity_bytes_.load(); }
  uint64_t kept_bytes() const { return kept_bytes_.load(); }
  size_t kept_count();
  void trim() noexcept { shrink_to(0); }
  bool give_way(uint64_t bytes) noexcept override;

 private:
  using Key = std::pair<HostLocation, uint64_t>;  // and size
  Piece make(const HostLocation& location, HostClaim claim, uint64_t size_bytes, const std::string& purpose);
  Piece take_kept(const Key& key);
  bool keep(const Key& key, Piece piece) noexcept;  // false: it has gone to the system
  bool has_room(uint64_t size_bytes) const { return kept_bytes_.load() + size_bytes <= capacity_bytes_.load(); }
  void shrink_to(uint64_t bytes) noexcept;

  HostBudget& budget_;
  std::mutex mutex_;
  std::map<Key, std::vector<Piece>> kept_;
  std::atomic<uint64_t> kept_bytes_{0};
  std::atomic<uint64_t> capacity_bytes_{0};
};

}  // namespace ebbtide
