#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "core/budget/host_budget.h"
#include "core/budget/pinned_budget.h"
#include "core/memory/capture_gate.h"
#include "policy/slab_space.h"
#include "store/host_memory.h"

// Host memory for bytes that were evicted from a device: pieces of pinned slabs, which are kept for the next step, or
// ordinary memory where nothing can be pinned.
//
// Large pieces and small ones have slabs apart, so that a small piece does not spoil a slab that a large one will want
// again. Only before a refusal a piece is cut from the other kind.
namespace ebbtide::lms {

class EvictedMemory {
 public:
  static constexpr uint64_t kAlignment = 256;  // of pieces: what copies over the bus like
  static constexpr uint64_t kSharedSlabBytes = 32 * kMiB;
  static constexpr uint64_t kSmallPieceBytes = 8 * kMiB;  // larger ones have slabs of their own size, in pages

  EvictedMemory(HostBudget& budget, PinnedBudget& pinned_budget, CaptureGate& gate)
      : budget_(budget), pinned_budget_(pinned_budget), gate_(gate) {}

  // Its pages are there when this returns. Throws StoreError, and takes nothing, if the host has too little room;
  // InvalidArgument.
  std::byte* take(int device, size_t size_bytes);
  // No copy may use it any more. Throws InvalidArgument for an address that take() did not return, or that was given
  // back.
  void give_back(void* piece);
  // Gives all free slabs back to the system. Throws StateError, and gives nothing back, during a capture.
  void trim();
  // The device may use the piece that holds this address for ever: it is not used again.
  void abandon(const void* address) noexcept;

  struct Usage {
    uint64_t held_bytes = 0;
    uint64_t used_bytes = 0;
    uint64_t pinned_bytes = 0;
  };
  Usage usage() const;

 private:
  // Both keep memory that the device may use for ever, with its charges.
  struct Slab {
    Slab(int device_ordinal, HostCharge host_charge, PinnedCharge pinned_charge,
         std::unique_ptr<HostMemory> pinned_memory)
        : device(device_ordinal),
          charge(std::move(host_charge)),
          pinned(std::move(pinned_charge)),
          memory(std::move(pinned_memory)) {}
    ~Slab();
    const int device;
    HostCharge charge;
    PinnedCharge pinned;
    std::unique_ptr<HostMemory> memory;  // goes before its charges do
  };
  struct OrdinaryPiece {
    OrdinaryPiece(HostCharge host_charge, std::unique_ptr<HostMemory> anonymous_memory)
        : charge(std::move(host_charge)), memory(std::move(anonymous_memory)) {}
    ~OrdinaryPiece();
    HostCharge charge;
    std::unique_ptr<HostMemory> memory;
    bool is_abandoned = false;
    bool is_given_back = false;  // and abandoned
  };
  using Slabs = std::map<uint64_t, std::unique_ptr<Slab>>;
  using OrdinaryPieces = std::map<uint64_t, std::unique_ptr<OrdinaryPiece>>;

  std::byte* take_kept(policy::SlabSpace& space, uint64_t size_bytes);
  std::byte* take_fresh(int device, uint64_t size_bytes, bool is_small);
  std::byte* take_from_new_slab(int device, uint64_t slab_bytes, uint64_t size_bytes, bool is_small);
  std::byte* take_ordinary(uint64_t size_bytes);
  std::unique_ptr<Slab> make_slab(int device, uint64_t size_bytes);
  std::optional<CaptureGate::Permit> try_enter();
  bool give_back_free_slabs() noexcept;

  HostBudget& budget_;
  PinnedBudget& pinned_budget_;
  CaptureGate& gate_;
  std::atomic<bool> is_pinning_refused_{false};  // by the driver, since slabs went back or trim()
  mutable std::mutex mutex_;
  Slabs slabs_;
  policy::SlabSpace small_;
  policy::SlabSpace large_;
  OrdinaryPieces ordinary_;
  uint64_t ordinary_bytes_ = 0;
};

// The process's one. Leaked on purpose: graphs may be freed after static destructors have run.
EvictedMemory& evicted_memory();

}  // namespace ebbtide::lms
