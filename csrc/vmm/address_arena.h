#pragma once

#include <cstddef>
#include <memory>

#include "base/bytes.h"
#include "vmm/reservation.h"

namespace ebbtide {

struct ArenaRange {
  struct Arena;
  std::shared_ptr<Arena> arena;
  CUdeviceptr reservation = 0;
  CUdeviceptr address = 0;
  size_t size_bytes = 0;

  explicit operator bool() const { return arena != nullptr; }
  void undo() const noexcept;
};

// Owns a range of an arena's addresses, without the memory behind them. All mappings in it must be undone before it is
// destroyed. If one could not be undone (deferred_undos.h), the range is freed after that mapping.
class Addresses : public Owner<ArenaRange> {
 public:
  Addresses() = default;
  explicit Addresses(const ArenaRange& range) noexcept : Owner(range) {}
  CUdeviceptr address() const { return object_.address; }
  size_t size_bytes() const { return object_.size_bytes; }
  // Whether both are in one reservation: then one mapping may cover them if they are neighbours.
  bool is_of_one_reservation_with(const Addresses& other) const {
    return object_.reservation == other.object_.reservation;
  }
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
  std::shared_ptr<ArenaRange::Arena> arena_;
};

}  // namespace ebbtide
