#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "driver/driver.h"
#include "store/pinned_memory.h"

// Pinned memory between device and store, which the copy engine reaches at full rate.
namespace ebbtide {

// Owns one pinned block, portable to all devices.
class Staging {
 public:
  // Allocated by the driver, for small memory that kernels read and write. Throws DriverError if the system pins no
  // more.
  static std::unique_ptr<Staging> allocate(size_t size_bytes);
  // A ring for the copy engine. If the driver can, it is touched by this number of threads and then pinned; otherwise
  // it is made as above. Throws DriverError, and StoreError if the system has no memory.
  static std::unique_ptr<Staging> pin(size_t size_bytes, int threads);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  std::byte* bytes() const { return bytes_; }
  size_t size_bytes() const { return size_bytes_; }
  // The copy engine may still use the block, because a synchronisation failed. It is never freed nor used again.
  void poison() noexcept { is_poisoned_.store(true); }
  bool is_poisoned() const { return is_poisoned_.load(); }

 private:
  Staging(std::byte* bytes, size_t size_bytes) : bytes_(bytes), size_bytes_(size_bytes) {}
  std::byte* bytes_;
  std::optional<PinnedMemory> pinned_;  // empty: the driver's
  size_t size_bytes_;
  std::atomic<bool> is_poisoned_{false};
};

}  // namespace ebbtide
