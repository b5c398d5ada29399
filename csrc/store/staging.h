#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "driver/driver.h"
#include "store/pinned_memory.h"

// The pinned ring between device and store: a fixed number of slots that the copy engine can reach at full rate.
namespace ebbtide {

// Owns one pinned block, portable to all devices, cut into slots.
class Staging {
 public:
  // Of the driver's making: for what is small, and what kernels read and write. Throws DriverError where the system pins no more.
  static std::unique_ptr<Staging> allocate(size_t slot_bytes, int slot_count);
  // A ring for the copy engine: touched by so many threads and then pinned, where the driver can, else as above. Throws DriverError as well; StoreError where the system has no memory.
  static std::unique_ptr<Staging> pin(size_t slot_bytes, int slot_count, int threads);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  std::byte* slot(int index) const { return bytes_ + static_cast<size_t>(index) * slot_bytes_; }
  size_t slot_bytes() const { return slot_bytes_; }
  int slot_count() const { return slot_count_; }
  size_t size_bytes() const { return slot_bytes_ * static_cast<size_t>(slot_count_); }
  // The copy engine may still use the slots (a synchronisation failed): the block is never given back nor lent again.
  void poison() noexcept { is_poisoned_.store(true); }
  bool is_poisoned() const { return is_poisoned_.load(); }

 private:
  Staging(std::byte* bytes, size_t slot_bytes, int slot_count)
      : bytes_(bytes), slot_bytes_(slot_bytes), slot_count_(slot_count) {}
  std::byte* bytes_;
  std::optional<PinnedMemory> pinned_;  // empty: the driver's
  size_t slot_bytes_;
  int slot_count_;
  std::atomic<bool> is_poisoned_{false};
};

}  // namespace ebbtide
