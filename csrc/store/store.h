#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

// Where bytes go while they are away. The lowest seam of this layer: a store opens backups, a backup keeps the bytes of one allocation, addressed by offset.
// Budgets are the caller's: a store takes what it is told to.
namespace ebbtide {

enum class BackupKind { kNone = 0, kRam = 1, kPinned = 2, kDisk = 3 };

class Backup {
 public:
  virtual ~Backup() = default;
  // offset + size_bytes lie within the backup. May be called by several threads at once on disjoint ranges. Throw StoreError; what was written before stays whole.
  // bytes: in the staging ring, or memory aligned like one (4 KiB).
  virtual void write(size_t offset, const std::byte* bytes, size_t size_bytes) = 0;
  virtual void read(size_t offset, std::byte* bytes, size_t size_bytes) const = 0;
  // The whole backup where it lies in memory, so that looking at it costs no copy; else null.
  virtual const std::byte* memory() const noexcept { return nullptr; }
  // The bytes of this range are not wanted any more: the store may give their memory back; read() of them is unspecified from then on.
  virtual void discard(size_t offset, size_t size_bytes) noexcept = 0;
  // Takes back what discard() gave of this range, where that could be refused at once: the range can be written then as after open(). Throws StoreError.
  virtual void reclaim(size_t /*offset*/, size_t /*size_bytes*/) {}
  // The whole backup as one range, for as long as the backup lives: it shows what write() writes, and what is written there is what read() gives. Null where the store can't show one. Throws StoreError.
  virtual std::byte* view() = 0;
  // Memory of the whole backup that the copy engine reaches by itself at full rate, or null: then the bytes go through the staging ring and write() and read(). Valid after seal().
  virtual std::byte* direct() noexcept { return nullptr; }
  // Takes the memory of this range now, so that nobody waits for it later. May be called by several threads at once on disjoint ranges. Throws StoreError.
  virtual void populate(size_t /*offset*/, size_t /*size_bytes*/) {}
  // Once, before the first byte, after whatever populate() calls there were: what must be done to the whole of it (pinning). Throws StoreError.
  virtual void seal() {}
  // A copy of the copy engine's own could not be waited for, and may go on for ever: direct() memory is never given back. By any thread.
  virtual void abandon() noexcept {}
  // Whether its memory will outlive it for that reason.
  virtual bool is_abandoned() const noexcept { return false; }
};

class Store {
 public:
  virtual ~Store() = default;
  // A backup of size_bytes with unspecified content. Throws StoreError. Takes what can be refused at once (address space, space in a file); touches no page.
  virtual std::unique_ptr<Backup> open(size_t size_bytes) = 0;
};

// The store of a kind; throws InvalidArgument for kinds that have none.
Store& store_of(BackupKind kind);

}  // namespace ebbtide
