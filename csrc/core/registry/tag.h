#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/memory/allocation.h"

namespace ebbtide {

struct Tag {
  explicit Tag(std::string tag_name) : name(std::move(tag_name)) {}
  const std::string name;
  // All under the registry's lock.
  uint64_t epoch = 0;        // pauses so far
  uint64_t pause_count = 0;  // of them those that moved something, and no trims
  bool is_busy = false;      // an operation holds it
  bool is_moving = false;    // and takes memory away, or brings it back
  uint64_t ahead_step = 0;   // the step of copies ahead that holds it; 0: none does
  bool is_partial = false;   // an operation on it failed midway and none has finished it since
  struct OnDevice {
    Amounts amounts;  // the sum of `counted` of its allocations there
    size_t held_row;  // in the registry's table
  };
  std::map<int, OnDevice> devices;
  uint64_t last_lease = 0;                                      // the newest lease that was opened on it
  std::map<uint64_t, std::string> leases;                       // id -> holder
  std::map<uint64_t, std::shared_ptr<Allocation>> allocations;  // by sequence

  // As of the end of the last operation.
  Amounts total() const {
    Amounts sum;
    for (const auto& [device, on_device] : devices) sum += on_device.amounts;
    return sum;
  }
  // As of now. While an operation holds the tag, its allocations are counted one by one, without those that were freed
  // meanwhile.
  Amounts total_now() const {
    if (!is_busy) return total();
    Amounts sum;
    for (const auto& [sequence, allocation] : allocations) {
      if (!allocation->is_doomed) sum += allocation->amounts();
    }
    return sum;
  }
  bool is_any_away() const { return is_moving || total().away_count > 0; }  // also while an operation moves it

  // Where its allocations of this device lie. Under a lock of its own.
  AddressArena& arena(int device) {
    const std::lock_guard lock(arenas_mutex);
    return arenas[device];
  }
  std::atomic<bool> was_swapped{false};  // and may be again
  // The hooks of the preload library gave it to memory that no region holds.
  std::atomic<bool> is_hooked{false};
  std::mutex arenas_mutex;
  std::map<int, AddressArena> arenas;
};

}  // namespace ebbtide
