#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "driver/driver.h"

namespace ebbtide {

// Owns a range of host memory. Memory that is first touched and then pinned is there many times sooner than memory that
// the driver allocates pinned (csrc/DESIGN.md, F28). Pinned memory is pinned for all devices.
class HostMemory {
 public:
  // Anonymous memory, aligned to a huge page and in huge pages if the system has them. Pages are taken at first touch.
  // Throws StoreError if the system has no address space left.
  static std::unique_ptr<HostMemory> map(size_t size_bytes);
  // Pinned memory from the driver, for small tables. Throws DriverError if the system pins no more.
  static std::unique_ptr<HostMemory> allocate(size_t size_bytes);
  // Pinned memory of any size: touched by this number of threads and then pinned. Throws DriverError, and StoreError if
  // the system has no memory.
  static std::unique_ptr<HostMemory> pin(size_t size_bytes, int threads);
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  ~HostMemory();

  std::byte* bytes() const { return bytes_; }
  size_t size_bytes() const { return size_bytes_; }

  // Takes the pages of this range and keeps their content. Throws StoreError if the system has none to give.
  void populate(size_t offset, size_t range_bytes) const;
  // All of it, by this number of threads.
  void populate(int threads) const;
  // Gives back the pages that lie wholly in this range; they read as zeros then.
  void discard(size_t offset, size_t range_bytes) const noexcept;

  CUresult try_pin();
  bool is_pinned() const { return is_pinned_.load(); }  // by any thread
  // The device may use it for ever, because a synchronisation failed: it stays as it is after its owner, and is not
  // used again. By any thread.
  void abandon() noexcept { is_abandoned_.store(true); }
  bool is_abandoned() const { return is_abandoned_.load(); }

 private:
  HostMemory(std::byte* bytes, size_t size_bytes) : bytes_(bytes), size_bytes_(size_bytes) {}

  std::byte* const bytes_;
  const size_t size_bytes_;
  void* mapping_ = nullptr;  // null: the driver's
  size_t mapping_bytes_ = 0;
  std::atomic<bool> is_pinned_{false};
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace ebbtide
