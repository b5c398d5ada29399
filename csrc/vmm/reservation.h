#pragma once

#include <cstddef>
#include <utility>

#include "driver/driver.h"

namespace ebbtide {

// Owns a range of virtual addresses, without memory. All mappings in it must be undone before it is destroyed.
class Reservation {
 public:
  Reservation() = default;
  // size_bytes: a multiple of the granularity.
  static Reservation reserve(size_t size_bytes);
  Reservation(Reservation&& other) noexcept
      : address_(std::exchange(other.address_, 0)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation() { reset(); }

  CUdeviceptr address() const { return address_; }
  size_t size_bytes() const { return size_bytes_; }
  void reset() noexcept;

 private:
  CUdeviceptr address_ = 0;
  size_t size_bytes_ = 0;
};

}  // namespace ebbtide
