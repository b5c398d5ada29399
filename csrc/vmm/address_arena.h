#pragma once

#include <cstddef>
#include <memory>

#include "base/bytes.h"
#include "vmm/reservation.h"

namespace ebbtide {

// Owns a range of an arena's addresses, without the memory behind them. All mappings in it must be undone before it is
// destroyed. If one could not be undone (deferred_undos.h), the range is freed after that mapping.
class Addresses {
 public:
  Addresses() = default;
  Addresses(Addresses&& other) noexcept { *this = std::move(other); }
  Addresses& operator=(Addresses&& other) noexcept;
  ~Addresses() { reset(); }

  CUdeviceptr address() const { return address_; }
  size_t size_bytes() const { return size_bytes_; }
  // Whether both are in one reservation: then one mapping may cover them if they are neighbours.
  bool is_of_one_reservation_with(const Addresses& other) const { return reservation_ == other.reservation_; }
  // The addresses are never freed.
  void leak() noexcept { arena_.reset(); }

 private:
  friend class AddressArena;
  void reset() noexcept;

  struct Arena;
  std::shared_ptr<Arena> arena_;
  CUdeviceptr reservation_ = 0;
  CUdeviceptr address_ = 0;
  size_t size_bytes_ = 0;
};

// Addresses of allocations that leave and return together. They are cut from large reservations, lowest first, so that
// one handle can serve neighbours. A reservation is freed with the last of its addresses.
class AddressArena {
 public:
  static constexpr size_t kReservationBytes = 16 * kGiB;

  AddressArena();
  // size_bytes: a multiple of the granularity, not 0. Throws DriverError.
  Addresses take(size_t size_bytes);

 private:
  std::shared_ptr<Addresses::Arena> arena_;
};

}  // namespace ebbtide
