#include "vmm/reservation.h"

#include <string>

#include "vmm/held_addresses.h"

namespace ebbtide {

Reservation Reservation::reserve(size_t size_bytes) {
  if (held_addresses::are_used())
    return Reservation({Undo::Kind::kLetGo, held_addresses::hold(size_bytes), size_bytes});
  CUdeviceptr address = 0;
  check(driver().cuMemAddressReserve(&address, size_bytes, 0, 0, 0), "cuMemAddressReserve",
        "size=" + std::to_string(size_bytes));
  return Reservation({Undo::Kind::kAddressFree, address, size_bytes});
}

}  // namespace ebbtide
