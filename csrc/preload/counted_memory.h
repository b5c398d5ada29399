#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "core/device_budget.h"
#include "core/host_budget.h"

// Memory that is the driver's own and counts all the same: EBBTIDE_DEVICE_LIMIT makes the device small for all that the program takes, and what leaves must know what it took.
namespace ebbtide::preload {

// What one allocation of the driver's takes of our budgets.
struct Charges {
  DeviceCharge device;
  HostClaim host;
};

class CountedMemory {
 public:
  // An entry that is made before the memory is: keeping it then needs no memory of its own, and can't fail.
  using Entry = std::map<uint64_t, Charges>::node_type;
  static Entry make_entry(Charges charges);

  // key: an address, or a handle; unique as long as the driver does not give it again.
  void keep(uint64_t key, Entry entry) noexcept;
  // Taken out before the driver frees: another thread may be given the same address at once. Empty where the memory was not counted.
  Entry take(uint64_t key) noexcept;
  size_t count() const;

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, Charges> entries_;
};

// Leaked on purpose: frees come after static destructors.
CountedMemory& counted_addresses();
CountedMemory& counted_handles();

}  // namespace ebbtide::preload
