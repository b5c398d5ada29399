#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

// Where bytes are stored while their memory is away. A store opens backups. A backup keeps the bytes of one allocation,
// addressed by offset. Stores check no budget: the caller has claimed the memory.
namespace ebbtide {

enum class BackupKind { kNone = 0, kRam = 1, kPinned = 2, kDisk = 3 };
inline constexpr size_t kBackupKinds = 4;

class Backup {
 public:
  virtual ~Backup() = default;
  // offset + size_bytes lies within the backup. Both are multiples of 4 KiB, and bytes is aligned to it, as the staging
  // ring and AlignedBytes are. Several threads may call these at once on disjoint ranges. Throw StoreError; bytes
  // written before stay intact.
  virtual void write(size_t offset, const std::byte* bytes, size_t size_bytes) = 0;
  virtual void read(size_t offset, std::byte* bytes, size_t size_bytes) const = 0;
  // The whole backup where it lies in memory, so that looking at it costs no copy; else null.
  virtual const std::byte* memory() const noexcept { return nullptr; }
  // The bytes of this range are no longer needed, and the store may free their memory. After this, read() of them is
  // unspecified.
  virtual void discard(size_t offset, size_t size_bytes) noexcept = 0;
  // Takes back the space that discard() freed in this range, so that a refusal comes now. The range can then be written
  // as after open(). Throws StoreError.
  virtual void reclaim(size_t /*offset*/, size_t /*size_bytes*/) {}
  // The whole backup as one range, valid for the life of the backup. It shows the bytes of write(), and read() returns
  // bytes that are written to it. Null if the store can't show one. Throws StoreError.
  virtual std::byte* view() = 0;
  // The memory of the whole backup if the copy engine can access it directly at full rate. Null: the bytes go through
  // the staging ring with write() and read(). Valid after seal().
  virtual std::byte* direct() noexcept { return nullptr; }
  // Takes the memory of this range now, so that later writes need not wait for it. Several threads may call it at once
  // on disjoint ranges. Throws StoreError.
  virtual void populate(size_t /*offset*/, size_t /*size_bytes*/) {}
  // Called once, after any populate() and before the first byte. Does the work that applies to the whole backup
  // (pinning). Throws StoreError.
  virtual void seal() {}
  // Pins memory of an open backup whose every page was touched, where the store can, so that direct() has it from now
  // on. Its conditions are those of seal(). False: nothing has changed. No other thread may use the backup meanwhile.
  virtual bool try_pin() noexcept { return false; }
  // A copy by the copy engine could not be waited for and may continue for ever: the memory of direct() is never freed.
  // Any thread may call it.
  virtual void abandon() noexcept {}
  // Whether its memory will outlive it for that reason.
  virtual bool is_abandoned() const noexcept { return false; }
};

// Throws InvalidArgument for a kind that has no store.
void require_store(BackupKind kind);
// Opens a backup of size_bytes with unspecified content. Takes the resources that can be refused at once (address
// space, space in a file), and touches no page. Throws StoreError; InvalidArgument as above.
std::unique_ptr<Backup> open_backup(BackupKind kind, size_t size_bytes);

}  // namespace ebbtide
