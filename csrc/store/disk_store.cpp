#include "store/disk_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "base/bytes.h"
#include "store/aligned_bytes.h"

namespace ebbtide {
namespace {

constexpr size_t kBlock = BackupFile::kBlockBytes;
constexpr size_t kBounceBytes = kMiB;

class DiskBackup : public Backup {
 public:
  explicit DiskBackup(BackupFile file) : file_(std::move(file)) {}
  DiskBackup(const DiskBackup&) = delete;
  DiskBackup& operator=(const DiskBackup&) = delete;
  ~DiskBackup() override {
    if (view_ != nullptr) ::munmap(view_, file_.size_bytes());
  }

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override;
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override;
  void discard(size_t offset, size_t size_bytes) noexcept override { file_.punch(offset, size_bytes); }
  void reclaim(size_t offset, size_t size_bytes) override { file_.reclaim(offset, size_bytes); }
  std::byte* view() override;

 private:
  // Reads from the file to memory, or writes from there. left: the rest to move. Returns how much one request has
  // moved.
  enum class Access { kRead, kWrite };
  size_t move_part(Access access, size_t offset, std::byte* bytes, size_t left) const;

  const BackupFile file_;
  // Ranges of two threads may meet within one block, so a part of a block is moved under a lock.
  mutable std::mutex partial_block_;
  std::mutex view_mutex_;
  std::byte* view_ = nullptr;
};

// One request moves whole blocks, or a range within one block.
size_t DiskBackup::move_part(Access access, size_t offset, std::byte* bytes, size_t left) const {
  const bool is_read = access == Access::kRead;
  const size_t within = offset % kBlock;
  const bool is_whole = within == 0 && left >= kBlock;
  const size_t part_bytes = is_whole ? left / kBlock * kBlock : std::min(left, kBlock - within);
  if (is_whole && reinterpret_cast<uintptr_t>(bytes) % kBlock == 0) {
    is_read ? file_.read(offset, bytes, part_bytes) : file_.write(offset, bytes, part_bytes);
    return part_bytes;
  }
  // Through aligned memory.
  const size_t moved_bytes = std::min(part_bytes, kBounceBytes);
  const size_t block_bytes = round_up(moved_bytes, kBlock);
  const AlignedBytes blocks(block_bytes);
  const std::lock_guard lock(partial_block_);
  if (is_read || moved_bytes < block_bytes) file_.read(offset - within, blocks.get(), block_bytes);
  if (is_read) {
    std::memcpy(bytes, blocks.get() + within, moved_bytes);
  } else {
    std::memcpy(blocks.get() + within, bytes, moved_bytes);
    file_.write(offset - within, blocks.get(), block_bytes);
  }
  return moved_bytes;
}

void DiskBackup::write(size_t offset, const std::byte* bytes, size_t size_bytes) {
  // Without alignment to mind, all of it is one request.
  if (!file_.is_direct()) return file_.write(offset, bytes, size_bytes);
  for (size_t done = 0; done < size_bytes;)
    done += move_part(Access::kWrite, offset + done, const_cast<std::byte*>(bytes) + done, size_bytes - done);
}

void DiskBackup::read(size_t offset, std::byte* bytes, size_t size_bytes) const {
  if (!file_.is_direct()) return file_.read(offset, bytes, size_bytes);
  for (size_t done = 0; done < size_bytes;)
    done += move_part(Access::kRead, offset + done, bytes + done, size_bytes - done);
}

std::byte* DiskBackup::view() {
  const std::lock_guard lock(view_mutex_);
  if (view_ == nullptr) view_ = file_.map();
  return view_;
}

}  // namespace

std::unique_ptr<Backup> open_disk_backup(size_t size_bytes, const FileCalls& calls) {
  return std::make_unique<DiskBackup>(BackupFile::create(disk_place(), size_bytes, calls));
}

}  // namespace ebbtide
