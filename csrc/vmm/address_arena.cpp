#include "vmm/address_arena.h"

#include <sys/resource.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "vmm/deferred_undos.h"

namespace ebbtide {

struct ArenaRange::Arena {
  struct ReservedRange {
    Reservation reservation;
    std::map<CUdeviceptr, size_t> taken;  // address -> size
    CUdeviceptr first_gap = 0;            // nothing is free before it
  };
  std::mutex mutex;
  std::list<ReservedRange> ranges;

  static CUdeviceptr take_from(ReservedRange& range, size_t size_bytes);  // 0: there is no such gap
  void give_back(CUdeviceptr reservation, CUdeviceptr address) noexcept;
};

namespace {

// Whether the process has no limit on addresses (ulimit -v).
bool has_all_addresses() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY;
}

// Exactly the requested size if addresses are scarce, for the process or for the device.
Reservation reserve_at_least(size_t size_bytes) {
  if (size_bytes < AddressArena::kReservationBytes && has_all_addresses()) {
    try {
      return Reservation::reserve(AddressArena::kReservationBytes);
    } catch (const DriverError&) {
      // If the next call is refused too, it gives the reason.
    }
  }
  return Reservation::reserve(size_bytes);
}

}  // namespace

void ArenaRange::undo() const noexcept {
  if (!deferred_undos::keep_if_mapped(*this)) arena->give_back(reservation, address);
}

CUdeviceptr ArenaRange::Arena::take_from(ReservedRange& range, size_t size_bytes) {
  const CUdeviceptr end = range.reservation.address() + range.reservation.size_bytes();
  CUdeviceptr gap = range.first_gap;
  bool is_first = true;
  for (auto next = range.taken.lower_bound(gap);; ++next) {
    const CUdeviceptr gap_end = next == range.taken.end() ? end : next->first;
    if (gap_end - gap >= size_bytes) break;
    if (next == range.taken.end()) return 0;
    is_first = is_first && gap == gap_end;
    gap = next->first + next->second;
    if (is_first) range.first_gap = gap;
  }
  range.taken.emplace(gap, size_bytes);
  if (is_first) range.first_gap = gap + size_bytes;
  return gap;
}

void ArenaRange::Arena::give_back(CUdeviceptr reservation, CUdeviceptr address) noexcept {
  std::list<ReservedRange> empty;  // goes outside the lock
  const std::lock_guard lock(mutex);
  const auto range = std::find_if(ranges.begin(), ranges.end(),
                                  [&](const ReservedRange& each) { return each.reservation.address() == reservation; });
  range->taken.erase(address);
  range->first_gap = std::min(range->first_gap, address);
  if (range->taken.empty()) empty.splice(empty.end(), ranges, range);
}

AddressArena::AddressArena() : arena_(std::make_shared<ArenaRange::Arena>()) {}

Addresses AddressArena::take(size_t size_bytes) {
  using ReservedRange = ArenaRange::Arena::ReservedRange;
  const std::lock_guard lock(arena_->mutex);
  ArenaRange taken{arena_, 0, 0, size_bytes};
  for (ReservedRange& range : arena_->ranges) {
    taken.address = ArenaRange::Arena::take_from(range, size_bytes);
    taken.reservation = range.reservation.address();
    if (taken.address != 0) return Addresses(taken);
  }
  std::list<ReservedRange> fresh(1);
  ReservedRange& range = fresh.front();
  range.reservation = reserve_at_least(size_bytes);
  range.first_gap = taken.reservation = range.reservation.address();
  taken.address = ArenaRange::Arena::take_from(range, size_bytes);
  arena_->ranges.splice(arena_->ranges.end(), fresh);
  return Addresses(taken);
}

}  // namespace ebbtide
