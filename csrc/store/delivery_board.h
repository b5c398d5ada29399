#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/block_types.h"

namespace ebbtide {

// The words of pinned memory that a delivery's threads, its kernel and waiting streams share (kernels/block_types.h). A
// gate only rises, from one delivery to the next, and the device compares cyclically. So a board can be reused while
// old waits are still queued: they stay satisfied. Boards are never returned to the system.
class DeliveryBoard {
 public:
  // An unused board, or a new one. Makes the device's context current meanwhile. Throws DriverError.
  explicit DeliveryBoard(int device);
  DeliveryBoard(const DeliveryBoard&) = delete;
  DeliveryBoard& operator=(const DeliveryBoard&) = delete;
  ~DeliveryBoard();

  uint32_t* words() const { return words_; }
  // The number of the lane's pieces that are in place.
  uint32_t done(uint32_t lane) const { return word(lane, kernels::kDone).load(std::memory_order_acquire); }
  // The slot holds the lane's piece of this number, counted from 1.
  void fill(uint32_t lane, uint32_t slot, uint32_t number) {
    word(lane, kernels::kFirstFilled + slot).store(number, std::memory_order_release);
  }
  // The kernel may run for ever, so the words are never used again.
  void abandon() noexcept { is_abandoned_.store(true); }
  void cancel() noexcept { std::atomic_ref(words_[0]).store(1, std::memory_order_release); }
  // The word that streams wait for, and its value when this many pieces of the lane are in place.
  const uint32_t* gate(uint32_t lane) const { return words_ + at(lane, kernels::kGate); }
  uint32_t gate_value(uint32_t lane, uint32_t pieces) const { return words_[at(lane, kernels::kBase)] + pieces; }

  // For tests that reset the simulator: the words are gone. None may be in use.
  static void forget_all() noexcept;

 private:
  static size_t at(uint32_t lane, uint32_t which) { return kernels::kLaneWords * (1 + lane) + which; }
  std::atomic_ref<uint32_t> word(uint32_t lane, uint32_t which) const {
    return std::atomic_ref(words_[at(lane, which)]);
  }
  uint32_t* words_;
  std::atomic<bool> is_abandoned_{false};
};

}  // namespace ebbtide
