#pragma once

#include <atomic>
#include <cstdint>

#include "base/bytes.h"
#include "kernels/block_types.h"
#include "policy/chunking.h"
#include "policy/placement.h"

// The settings of the core's decisions. Any thread may change them at any time.
namespace ebbtide {

// In place of zeros, so that programs that rely on dropped content notice it.
inline constexpr unsigned char kPoisonByte = 0xEB;
inline constexpr kernels::Value kPoison = {0xEBEBEBEBEBEBEBEB, 0xEBEBEBEBEBEBEBEB};

// The blocks that a pause may skip. Each rule can be switched off.
struct SkipRules {
  std::atomic<bool> clean{true}, unused{true}, constant{true};
};

// Of all regions that overflow.
struct OverflowRules {
  static constexpr uint64_t kDefaultReserve = kUnlimited;
  // Device memory that a spill leaves free. The default follows from the device's size.
  std::atomic<uint64_t> reserve_bytes{kDefaultReserve};
  uint64_t reserve_of(uint64_t total_bytes) const {
    const uint64_t bytes = reserve_bytes.load();
    return bytes == kDefaultReserve ? policy::default_reserve(total_bytes) : bytes;
  }
  // The part of the limit that large allocations leave to small ones. The default reserve never bounds it.
  uint64_t room_for_small(uint64_t limit_bytes) const {
    return policy::room_for_small(limit_bytes, reserve_bytes.load());
  }
};

struct Rules {
  SkipRules skip;
  OverflowRules overflow;
  std::atomic<uint64_t> shared_handle_bytes{policy::kSharedHandleBytes};  // at most behind one handle; 0: none share
  std::atomic<bool> must_poison{false};                                   // dropped memory comes back as kPoison
  std::atomic<bool> clears_handed{true};  // memory of another process shows none of its bytes
  // A caller takes steps of copies ahead after each resume, which therefore keeps the backup until another holder needs
  // the memory.
  std::atomic<bool> keeps_ahead{false};
  // Large model support is on for GPUs: the preload library sends no memory of torch's to the host.
  std::atomic<bool> leaves_torch_to_lms{false};
  // The value of a block whose content was dropped.
  kernels::Value dropped_value() const { return must_poison.load() ? kPoison : kernels::Value{}; }
};

}  // namespace ebbtide
