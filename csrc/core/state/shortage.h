#pragma once

#include <string>
#include <utility>

#include "base/error.h"
#include "core/state/core.h"
#include "vmm/late_memory.h"

// The core's ways out of a shortage of memory: it gives back its caches, and asks once more.
namespace ebbtide {

// Gives back ebbtide's own rests: undos that failed, frees that were put off. True if any of it went. Does
// nothing that a capture forbids while one is known.
// may_wait: also frees that a step of copies ahead or a resume in the background puts off, for whose end it waits. That
// is worth it before an out-of-memory error.
bool give_back_caches(Core& core, bool may_wait = false) noexcept;

// For one call: gives back at most once.
class LastResort {
 public:
  LastResort(Core& core, bool may_give_back)
      : core_(core),
        may_wait_(may_give_back),
        may_give_back_(may_give_back),
        freeing_steps_(core.registry.ahead_steps.freeing_count()) {}
  bool may_wait() const noexcept { return may_wait_; }
  // True where another try is worthwhile.
  bool give_back(bool may_wait) noexcept {
    if (!std::exchange(may_give_back_, false)) return false;
    // Or a step has ended and given memory back since the first try.
    return give_back_caches(core_, may_wait) || core_.registry.ahead_steps.freeing_count() != freeing_steps_;
  }

 private:
  Core& core_;
  const bool may_wait_;
  bool may_give_back_;
  const uint64_t freeing_steps_;
};

// The device, or its budget, has too little.
bool is_device_shortage(const Error& error) noexcept;
// The same, or the host has.
bool is_shortage(const Error& error) noexcept;

// attempt(), and once more where it found too little memory and some could be given back. Throws as attempt() does.
template <typename Attempt>
auto retry_when_short(LastResort& last_resort, const Attempt& attempt) {
  try {
    return attempt();
  } catch (const Error& error) {
    if (!is_shortage(error) || !last_resort.give_back(true)) throw;
  }
  return attempt();
}

// The same for so many bytes of a device: once more, too, where what this process gave back comes late.
template <typename Attempt>
auto retry_when_short(LastResort& last_resort, int device, uint64_t size_bytes, const Attempt& attempt) {
  const auto attempts = [&] { return retry_when_short(last_resort, attempt); };
  return last_resort.may_wait() ? late_memory::retry(device, size_bytes, attempts) : attempts();
}

// Free bytes on the device, by the driver; 0 where it does not say.
uint64_t free_device_bytes(int device) noexcept;

// error as an OutOfMemory with numbers if it is the driver's; rethrows anything else.
[[noreturn]] void rethrow_shortage(const DriverError& error, const DeviceBudget& budget, int device,
                                   uint64_t requested_bytes, const std::string& purpose);

}  // namespace ebbtide
