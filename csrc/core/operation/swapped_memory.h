#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "core/budget/device_budget.h"
#include "vmm/physical_memory.h"

namespace ebbtide {

// Device memory that changes hands during a swap, on one device. The giving side offers what it releases, the taking
// side takes it; together they hold at most limit_bytes. A handle of a wanted kind is handed over. Any other is
// released, and its bytes are created anew in the wanted kinds. This always ends: kept handles are a part of the wanted
// ones, so once everything was offered there is room for the next taker.
class SwappedMemory {
 public:
  // Beyond the larger of the two sides, so that both directions of the bus have something to do from the start.
  static constexpr uint64_t kMarginBytes = 256 * kMiB;
  struct Handle {
    DeviceCharge charge;
    PhysicalMemory memory;
    bool is_fresh = PhysicalMemory::is_made_clear();  // reads as zeros; else it may hold bytes of its last owner
  };

  // leaving_bytes: held by the giving side now, which will offer it. limit_bytes: at least the larger of both sides.
  SwappedMemory(int device, uint64_t leaving_bytes, uint64_t limit_bytes)
      : device_(device), held_bytes_(leaving_bytes), limit_bytes_(limit_bytes) {}

  // Before anything is offered. A handle of this kind will be taken.
  void announce(const HandleKind& kind);
  // Before anything is offered. Creates these handles, in order, as far as the limit allows, paid for by
  // charge. required_bytes are created in any case; it throws DriverError if they can't be. Where no whole handle fits
  // into the rest of them, placeholders hold it until the first handle is created for a taker. If more can't be had,
  // the limit is lowered.
  void create_ahead(const std::vector<HandleKind>& handles, uint64_t required_bytes, DeviceCharge charge);

  // After that: so many handles of this kind are sure to be offered, and the taking side creates none in their place.
  // How many it wants by then.
  size_t wanted(const HandleKind& kind);
  void promise(const HandleKind& kind, size_t count) { promised_[kind] = count; }

  // The giving side. Takes over both. A handle of a kind that is not wanted is released; if that throws DriverError,
  // memory keeps its handle and charge its bytes.
  void offer(PhysicalMemory& memory, DeviceCharge& charge);
  // The same for memory that was released elsewhere, and its charge.
  void note_released(uint64_t size_bytes, DeviceCharge charge);
  // The giving side has ended.
  void close() noexcept;

  // The taking side: one announced handle. Waits for room. Throws DriverError where the device has too little after
  // all, StateError where the giving side ended too early, or gave nothing for so long.
  Handle take(const HandleKind& kind, std::chrono::seconds patience = std::chrono::hours(24 * 365));

 private:
  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<HandleKind, size_t> wanted_;  // handles that are still to be taken and not kept for it
  std::map<HandleKind, std::vector<Handle>> kept_;
  std::map<HandleKind, size_t> promised_;  // those of them that have not come
  std::vector<PhysicalMemory> placeholders_;
  DeviceCharge spare_;  // of memory that was released or is the placeholder's, for memory to be created
  uint64_t held_bytes_;
  uint64_t limit_bytes_;
  bool is_closed_ = false;
};

}  // namespace ebbtide
