#include "vmm/reservation.h"

#include "vmm/deferred_undos.h"

namespace ebbtide {

Reservation Reservation::reserve(size_t size_bytes) {
  Reservation reservation;
  check(driver().cuMemAddressReserve(&reservation.address_, size_bytes, 0, 0, 0), "cuMemAddressReserve",
        "size=" + std::to_string(size_bytes));
  reservation.size_bytes_ = size_bytes;
  return reservation;
}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this == &other) return *this;
  reset();
  address_ = std::exchange(other.address_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

void Reservation::reset() noexcept {
  if (address_ == 0) return;
  const CUresult result = driver_if_loaded()->cuMemAddressFree(address_, size_bytes_);
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_DEINITIALIZED)
    deferred_undos::add_address_free(address_, size_bytes_);
  address_ = 0;
  size_bytes_ = 0;
}

}  // namespace ebbtide
