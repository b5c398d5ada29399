#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "core_fixture.h"

// Allocations that have spilled, and the checks that must hold at every moment, whatever failed.
namespace ebbtide::testing {

inline constexpr Policy kSplitRam = {BackupKind::kRam, false, Overflow::kSplit, false};
inline constexpr Policy kSplitNone = {BackupKind::kNone, false, Overflow::kSplit, false};
inline constexpr Policy kWholeRam = {BackupKind::kRam, false, Overflow::kWhole, false};

class OverflowWorld : public CoreTest {
 protected:
  struct Item {
    std::string tag;
    int device = 0;
    CUdeviceptr address = 0;
    size_t size_bytes = 0;
    std::vector<bool> is_blank;  // by block: it was dropped, so it reads as zeros
  };

  OverflowWorld() { start(); }
  // A new core whose spills leave nothing free on the device.
  void start() {
    restart();
    items_.clear();
    core().rules.overflow.reserve_bytes = 0;
  }

  CUdeviceptr alloc_with(const std::string& tag, const Policy& policy, uint64_t size_bytes, int device = 0);
  // Whether the allocation would have to spill, so that the caller must release its caches first.
  bool must_flush(const std::string& tag, const Policy& policy, uint64_t size_bytes) {
    return try_allocate(core(), core().registry.tag(tag), policy, 0, size_bytes).must_flush();
  }
  // A filled allocation with this much on the device and the rest on the host. Leaves the device unlimited.
  size_t spill(const std::string& tag, const Policy& policy, uint64_t device_bytes, uint64_t host_bytes,
               int device = 0);
  // A filled allocation on the device whose chunks have these sizes, in units of kChunk.
  size_t make(const std::string& tag, const Policy& policy, const std::vector<uint64_t>& chunks, int device = 0);
  void fill_item(size_t index);
  void free_all();

  uint64_t device_bytes(size_t index) { return find(index).device_bytes(); }
  uint64_t host_bytes(size_t index) { return find(index).host_bytes(); }
  uint64_t spilled_bytes();  // of all items
  const Allocation& find(size_t index) { return *core().registry.find(items_[index].address); }
  Report promote(const std::vector<std::string>& tags = {}, uint64_t max_bytes = kUnlimited, bool keeps_host = false) {
    OperationRequest request;
    request.tags.names = tags;
    request.max_bytes = max_bytes;
    request.keeps_host = keeps_host;
    return Operation::claim(core(), OperationKind::kPromote, std::move(request))->commit().front();
  }
  Report demote(const std::vector<std::string>& tags = {}, uint64_t max_bytes = kUnlimited) {
    OperationRequest request;
    request.tags.names = tags;
    request.max_bytes = max_bytes;
    return Operation::claim(core(), OperationKind::kDemote, std::move(request))->commit().front();
  }
  Report trim(const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses);
  Report resume_at(const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses);

  // Records the memory dropped until now. expect_sound does it first.
  void note_dropped();
  // Checks invariants 1 to 3 for the present state: addresses, bytes, owners, budgets.
  void expect_sound(const std::string& when);
  void expect_resident(const std::string& when);
  // Checks the rest once everything is freed: the pool's memory, and it counts.
  void expect_nothing_left();

  std::vector<Item> items_;

 private:
  Report run_at(OperationKind kind, const std::vector<std::string>& tags, const std::vector<CUdeviceptr>& addresses);
  void expect_chunk_sound(const Item& item, size_t index, const Chunk& chunk, const BackupRecord* stored);
};

}  // namespace ebbtide::testing
