// Host memory and copies of the C API, as owners.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "api/ebbtide.h"

namespace ebbtide::lms {

// Memory for bytes that have left a device. Empty: none.
class HostMemory {
 public:
  HostMemory() = default;
  // Empty if the host has too little room; problem says why.
  static HostMemory take(int device, uint64_t size_bytes, std::string* problem);
  HostMemory(HostMemory&& other) noexcept : address_(std::exchange(other.address_, nullptr)) {}
  HostMemory& operator=(HostMemory&& other) noexcept;
  ~HostMemory() { give_back(); }
  void* address() const { return address_; }
  explicit operator bool() const { return address_ != nullptr; }

 private:
  void give_back() noexcept;
  void* address_ = nullptr;
};

// A copy that was begun and has not been ended. Empty: none. The end of its life waits for it.
class OwnedCopy {
 public:
  OwnedCopy() = default;
  // After what is queued in the stream now. Empty if it could not begin; problem says why.
  static OwnedCopy to_host(int device, const HostMemory& to, const void* from, uint64_t size_bytes, void* stream,
                           std::string* problem);
  static OwnedCopy to_device(int device, void* to, const HostMemory& from, uint64_t size_bytes, void* stream,
                             std::string* problem);
  OwnedCopy(OwnedCopy&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  OwnedCopy& operator=(OwnedCopy&& other) noexcept;
  ~OwnedCopy() { end(); }

  explicit operator bool() const { return handle_ != nullptr; }
  bool is_done() const { return ebbtide_is_copy_done(handle_) != 0; }
  // The thread waits. Throws std::runtime_error.
  void wait();
  // What is queued in the stream from now on begins after the copy. Throws std::runtime_error.
  void come_before(void* stream);
  // The thread waits. False if the copy can't be waited for and may run for ever. seconds: how long the copy itself
  // took; waited_seconds: how long a stream waited for it. Both are unchanged where that is unknown.
  bool end(double* seconds = nullptr, double* waited_seconds = nullptr) noexcept;

 private:
  static OwnedCopy begin(int device, void* to, const void* from, uint64_t size_bytes, int32_t direction, void* stream,
                         std::string* problem);
  ebbtide_copy* handle_ = nullptr;
};

// The way of a storage's bytes: the host's side, and the copy that was begun last, if it may still be under way.
struct Transit {
  Transit() = default;
  Transit(Transit&&) = default;
  Transit& operator=(Transit&& other) noexcept;
  ~Transit() = default;

  HostMemory host;
  OwnedCopy copy;  // after host, so that it ends before host is given back
  uint64_t size_bytes = 0;
  bool is_arrival = false;
  bool is_prefetch = false;   // an arrival that nobody has waited for or asked for yet
  double waited_seconds = 0;  // how long threads have waited for the copy
};

}  // namespace ebbtide::lms
