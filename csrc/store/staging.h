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
  // Of the driver's making: for what is small, and what kernels read and write. Throws DriverError where the system pins no more.
  static std::unique_ptr<Staging> allocate(size_t size_bytes);
  // A ring for the copy engine: touched by so many threads and then pinned, where the driver can, else as above. Throws DriverError as well; StoreError where the system has no memory.
  static std::unique_ptr<Staging> pin(size_t size_bytes, int threads);
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;
  ~Staging();

  std::byte* bytes() const { return bytes_; }
  size_t size_bytes() const { return size_bytes_; }
  // The copy engine may still use it (a synchronisation failed): the block is never given back nor lent again.
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
