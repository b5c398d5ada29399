#pragma once

#include <cstddef>

#include "driver/driver.h"

// Addresses that this process holds itself and lends to the driver for as long as memory is behind them. For HIP, whose
// driver gives the memory of a range back only with the range (csrc/DESIGN.md, F48).
//
// Between the two an address belongs to nobody for a moment. So the ranges lie where no mmap without a wish puts
// anything. What another part of the program takes all the same is its own from then on: it is never unmapped here, and
// memory that should come back there is refused.
namespace ebbtide::held_addresses {

// Whether ranges are held so, in place of the driver's reservations.
bool are_used() noexcept;

// size_bytes: a multiple of the granularity. Throws DriverError, as a driver without addresses does.
CUdeviceptr hold(size_t size_bytes);
size_t count() noexcept;  // of the ranges that are held
void let_go(CUdeviceptr address, size_t size_bytes) noexcept;

// A part of a held range, for one handle. Throws DriverError, or StateError where the addresses are not to be had; then
// they are held as before.
void lend(CUdeviceptr address, size_t size_bytes);
// Once nothing is mapped there. The driver's answer; unless it is a success, the part stays lent.
CUresult take_back(CUdeviceptr address, size_t size_bytes) noexcept;

}  // namespace ebbtide::held_addresses
