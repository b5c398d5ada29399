#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "core/memory/backing.h"
#include "core/memory/backup_record.h"
#include "vmm/address_arena.h"

// One contiguous address range handed to the caller, and the chunks behind it.
//
// Who may touch what: tag, policy, device and the addresses never change. What backs a chunk belongs to whoever holds the allocation: alloc before it is
// registered, an operation while is_held, free after it left the registry. place may be read by anybody at any time. is_unused belongs to the operations; is_held, is_doomed, is_trimmed, stored and counted are under the registry's lock.
namespace ebbtide {

struct Tag;

// What becomes of an allocation for which the device has too little. kSplit: its front lies on the device, the rest on the host. kWhole: a large one lies on the host as a whole.
enum class Overflow { kNone = 0, kSplit = 1, kWhole = 2 };

struct Policy {
  BackupKind backup = BackupKind::kRam;
  bool retain = false;  // the backup's memory is kept after a resume, for the next pause; what is pinned always is
  Overflow overflow = Overflow::kNone;
  bool flushes_first = false;  // who asks gives its caches back when it is refused, and asks again: only then it spills
  bool is_freed_singly = false;  // who asks may give back any of it at any time, and counts on having the memory then
  friend bool operator==(const Policy&, const Policy&) = default;
};

enum class Place { kDevice = 0, kHost = 1, kStored = 2, kDropped = 3 };

struct Chunk {
  Chunk(size_t chunk_index, size_t chunk_offset, size_t chunk_bytes)
      : index(chunk_index), offset(chunk_offset), size_bytes(chunk_bytes) {}
  const size_t index;
  const size_t offset;  // in the allocation
  const size_t size_bytes;
  size_t first_block() const { return offset / kernels::kBlockBytes; }
  size_t block_count() const { return size_bytes / kernels::kBlockBytes; }
  size_t end_block() const { return first_block() + block_count(); }
  std::shared_ptr<Backing> backing = std::make_shared<Backing>();  // never null
  std::atomic<Place> place{Place::kDevice};
  // kDevice, or kHost: once it was dropped it comes back on the device if there is room, else on the host.
  Place home = Place::kDevice;
  // Its bytes are in its memory, which could not be mapped again: a resume does that. Until then it is away.
  std::atomic<bool> is_detached{false};

  // The device can reach the bytes: they are in its memory or in the host's. What is not resident is away.
  bool is_resident() const {
    const Place now = place.load(std::memory_order_acquire);
    return (now == Place::kDevice || now == Place::kHost) && !is_detached.load(std::memory_order_acquire);
  }
  bool is_on_device() const { return place.load(std::memory_order_acquire) == Place::kDevice; }
  bool is_on_host() const { return place.load(std::memory_order_acquire) == Place::kHost; }
  // Physical memory behind bytes that are away: an earlier call failed after the bytes had left, or before they were back.
  bool has_stale_memory() const { return !is_resident() && !is_detached.load() && backing->has_memory(); }
};

// What allocations amount to: of one, or a sum.
struct Amounts {
  uint64_t allocation_count = 0;
  uint64_t size_bytes = 0, resident_bytes = 0, device_bytes = 0, host_bytes = 0, stored_bytes = 0;
  uint64_t dropped_bytes = 0, trimmed_bytes = 0;  // the latter of trimmed allocations, and not among the former
  uint64_t retained_bytes = 0;                    // on the device, and in a backup
  uint64_t left_bytes = 0;                        // of the ones on the host: of paused allocations
  uint64_t away_count = 0;                        // allocations that a resume brings back: not trimmed ones
  uint64_t here_count = 0;  // allocations with something on the device, or with memory that a pause must give back
  Amounts& operator+=(const Amounts& other);
  Amounts& operator-=(const Amounts& other);
  friend bool operator==(const Amounts&, const Amounts&) = default;
};

struct Allocation {
  Tag* tag = nullptr;
  Policy policy;
  int device = -1;
  uint64_t sequence = 0;
  std::shared_ptr<const Addresses> addresses;
  std::deque<Chunk> chunks;

  std::shared_ptr<BackupRecord> stored;
  std::shared_ptr<Allocation> next_deferred;  // of DeferredFrees
  // Contexts other than the primary one that may have work on it: of who allocated it, and of who freed it.
  std::array<CUcontext, 2> other_contexts{};
  bool is_held = false;
  // A pause is done with it, and no resume has begun to bring it back: nothing of it is on the device. What lies on the host stays there, resident, if there is a backup: it is paused all the same.
  // Belongs to the operations; may be read by anybody at any time.
  std::atomic<bool> is_paused{false};
  bool is_unused = false;   // nobody used any of it when it was last paused
  bool is_trimmed = false;  // its memory was given up as unused; only a claim that asks for it brings it back
  bool is_doomed = false;   // freed while held: the operation finishes the free
  Amounts counted;          // what its tag's amounts hold of it: as of the end of the last operation on it

  CUdeviceptr address() const { return addresses->address(); }
  size_t size_bytes() const { return addresses->size_bytes(); }
  size_t resident_bytes() const;
  size_t device_bytes() const;
  size_t host_bytes() const;
  bool is_away() const { return resident_bytes() != size_bytes(); }
  // What operations ask before they select. What is paused already is no pause's and no promotion's.
  bool wants_pause() const { return has_stale_memory() || (has_memory() && !is_paused.load()); }
  bool wants_resume() const { return is_paused.load() || is_away(); }
  bool wants_trim() const { return !is_trimmed || has_memory() || stored != nullptr; }
  bool wants_promotion() const { return host_bytes() > 0 && !is_paused.load(); }
  bool is_any_stored() const;
  bool has_stale_memory() const;
  bool has_memory() const;  // behind any chunk, whatever its state
  // The same for one that is no operation's: others may share what is behind its chunks, and an operation may be at it. Then it is taken to be there.
  bool may_have_memory() const;
  const Chunk& chunk_at(size_t offset) const;
  Amounts amounts() const;  // as of now; under the registry's lock
};

}  // namespace ebbtide
