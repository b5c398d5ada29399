#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/bytes.h"
#include "core/memory/backing.h"
#include "core/memory/backup_record.h"
#include "core/memory/host_twins.h"
#include "vmm/address_arena.h"

// One contiguous address range that was handed to the caller, and the chunks behind it. The backing of a chunk belongs
// to the holder: the allocator until registration, an operation while is_held, the free after the registry. Any thread
// may read place. is_unused belongs to the operations. The registry's lock guards is_held, is_doomed, is_trimmed and
// counted, and the three counts below them; also stored and verdicts, which only the holder changes, so that it reads
// them without the lock. Tag, policy, device and addresses never change.
namespace ebbtide {

struct Tag;

// Where an allocation lies that the device has too little memory for. kSplit: its front on the device, the rest on the
// host. kWhole: all of a large one on the host.
enum class Overflow { kNone = 0, kSplit = 1, kWhole = 2 };

struct Policy {
  BackupKind backup = BackupKind::kRam;
  bool retain = false;  // whether a resume, unless told otherwise, keeps the backup; pinned ones are kept anyway
  Overflow overflow = Overflow::kNone;
  bool flushes_first = false;    // the caller flushes its caches when refused, and asks again: only then it spills
  bool is_exportable = false;    // other processes may have the memory on the device; it does not overflow
  bool is_freed_singly = false;  // the caller frees allocations one by one, and expects the memory back each time
  friend bool operator==(const Policy&, const Policy&) = default;
};

enum class Place { kDevice = 0, kHost = 1, kStored = 2, kDropped = 3 };

// The decision of the last pause about a block. Copied: kCopied (no earlier copy was known), kChanged (it differed from
// the copy of an earlier pause), kUncompared (not compared, or a change was wrongly expected), kFilled
// (it was one repeated value when it left before). Not copied: the others. kOnHost: on the host.
enum class Verdict : uint8_t {
  kNone = 0,
  kCopied = 1,
  kChanged = 2,
  kClean = 3,
  kUnused = 4,
  kConstant = 5,
  kDropped = 6,
  kOnHost = 7,
  kUncompared = 8,
  kFilled = 9
};
using Verdicts = std::vector<Verdict>;  // by block

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
  // Its memory holds its bytes, but could not be mapped again. It counts as away until a resume maps it.
  std::atomic<bool> is_detached{false};
  std::shared_ptr<HostTwins::Entry> twin;  // of a chunk on the device; null: none

  // The device can reach the bytes, in its own memory or in the host's. A chunk that is not resident is away.
  bool is_resident() const {
    const Place now = place.load(std::memory_order_acquire);
    return (now == Place::kDevice || now == Place::kHost) && !is_detached.load(std::memory_order_acquire);
  }
  bool is_on_device() const { return place.load(std::memory_order_acquire) == Place::kDevice; }
  bool is_on_host() const { return place.load(std::memory_order_acquire) == Place::kHost; }
  // Physical memory behind a chunk that is away. An earlier call failed after the bytes had left, or before they were
  // back.
  bool has_stale_memory() const { return !is_resident() && !is_detached.load() && backing->has_memory(); }
};

// Totals of one allocation, or of several.
struct Amounts {
#define EBBTIDE_AMOUNT(name) uint64_t name = 0;
#define EBBTIDE_INNER_AMOUNT(name) EBBTIDE_AMOUNT(name)
#include "core/memory/amounts.def"
#undef EBBTIDE_INNER_AMOUNT
#undef EBBTIDE_AMOUNT
  // Allocations by the kind of backup that holds their bytes, or that their policy asks for.
  std::array<uint64_t, kBackupKinds> with_backup{};
  // The part of retained_bytes that is on the host, of one allocation.
  uint64_t bytes_kept_beside_host() const { return saturating_subtract(retained_bytes, device_bytes); }
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
  std::shared_ptr<const Verdicts> verdicts;   // of the last pause; null before the first, and after a trim
  std::shared_ptr<Allocation> next_deferred;  // of DeferredFrees
  // Contexts other than the primary one that may have work queued on it: those of the allocating and of the freeing
  // thread.
  std::array<CUcontext, 2> other_contexts{};
  bool is_held = false;
  // A pause has finished with it, and no resume has begun. Nothing of it is on the device. Chunks on the host stay
  // there, resident, if there is a backup; the allocation is paused all the same. Operations write it; any thread may
  // read it at any time.
  std::atomic<bool> is_paused{false};
  // A resume in the background brings it: streams may wait for its bytes. The resume writes it; any thread may read it.
  std::atomic<bool> is_arriving{false};
  bool is_unused = false;   // none of it was in use when it was last paused
  bool is_trimmed = false;  // its memory was given up as unused; only a claim that asks for it brings it back
  bool is_doomed = false;   // freed while held: the operation finishes the free
  int keep_count = 0;       // more than 0: no operation takes it away
  int lent_count = 0;       // other processes that use it: an operation that takes it away asks them first
  int refusal_count = 0;    // those of them that would refuse, so that it stays
  Amounts counted;          // its part of the tag's amounts: as of the end of the last operation on it

  CUdeviceptr address() const { return addresses->address(); }
  size_t size_bytes() const { return addresses->size_bytes(); }
  // Behind the last one.
  Chunk& add_chunk(size_t chunk_bytes) {
    const size_t offset = chunks.empty() ? 0 : chunks.back().offset + chunks.back().size_bytes;
    return chunks.emplace_back(chunks.size(), offset, chunk_bytes);
  }
  size_t resident_bytes() const;
  size_t bytes_in(Place place) const;
  size_t device_bytes() const { return bytes_in(Place::kDevice); }
  size_t host_bytes() const { return bytes_in(Place::kHost); }
  size_t kept_beside_host_bytes() const;  // in the backup of chunks on the host; not while an operation holds it
  size_t known_bytes() const;  // on the device, and in the backup with a digest; not while an operation holds it
  bool is_away() const { return resident_bytes() != size_bytes(); }
  // Whether an operation of this kind selects it. Pauses, promotions and demotions skip paused ones.
  bool is_kept() const { return keep_count > 0; }
  bool wants_pause() const { return !is_kept() && (has_stale_memory() || (has_memory() && !is_paused.load())); }
  bool wants_resume() const { return is_paused.load() || is_away(); }
  bool wants_trim() const { return !is_kept() && (!is_trimmed || has_memory() || stored != nullptr); }
  bool wants_promotion() const { return host_bytes() > 0 && !is_paused.load(); }
  bool wants_demotion() const { return !is_kept() && device_bytes() > 0 && !is_paused.load(); }
  bool is_any_stored() const { return bytes_in(Place::kStored) > 0; }
  bool has_stale_memory() const;
  bool has_memory() const;  // behind any chunk, whatever its state
  // The same for an allocation that no operation holds. Its chunks may share their memory with others that an operation
  // holds: then the answer is yes.
  bool may_have_memory() const;
  const Chunk& chunk_at(size_t offset) const;
  Amounts amounts() const;  // as of now; under the registry's lock
};

}  // namespace ebbtide
