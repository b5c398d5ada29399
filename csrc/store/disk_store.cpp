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
  // The longest part at offset that one request can move, at most size_bytes: whole blocks, or the wanted range within
  // one block.
  static size_t part_at(size_t offset, size_t size_bytes) {
    const size_t within = offset % kBlock;
    if (within == 0 && size_bytes >= kBlock) return size_bytes / kBlock * kBlock;
    return std::min(size_bytes, kBlock - within);
  }
  static bool is_aligned(const std::byte* bytes, size_t part_bytes) {
    return part_bytes % kBlock == 0 && reinterpret_cast<uintptr_t>(bytes) % kBlock == 0;
  }
  size_t write_part(size_t offset, const std::byte* bytes, size_t part_bytes);
  size_t read_part(size_t offset, std::byte* bytes, size_t part_bytes) const;

  const BackupFile file_;
  // Ranges of two threads may meet within one block, so a part of a block is moved under a lock.
  mutable std::mutex partial_block_;
  std::mutex view_mutex_;
  std::byte* view_ = nullptr;
};

// Unaligned parts go through aligned memory. Returns how much of the part was moved.
size_t DiskBackup::write_part(size_t offset, const std::byte* bytes, size_t part_bytes) {
  if (is_aligned(bytes, part_bytes)) {
    file_.write(offset, bytes, part_bytes);
    return part_bytes;
  }
  if (part_bytes % kBlock == 0) {
    const size_t bounced_bytes = std::min(part_bytes, kBounceBytes);
    const AlignedBytes bounce(bounced_bytes);
    std::memcpy(bounce.get(), bytes, bounced_bytes);
    file_.write(offset, bounce.get(), bounced_bytes);
    return bounced_bytes;
  }
  const size_t within = offset % kBlock;
  const AlignedBytes block(kBlock);
  const std::lock_guard lock(partial_block_);
  file_.read(offset - within, block.get(), kBlock);
  std::memcpy(block.get() + within, bytes, part_bytes);
  file_.write(offset - within, block.get(), kBlock);
  return part_bytes;
}

size_t DiskBackup::read_part(size_t offset, std::byte* bytes, size_t part_bytes) const {
  if (is_aligned(bytes, part_bytes)) {
    file_.read(offset, bytes, part_bytes);
    return part_bytes;
  }
  if (part_bytes % kBlock == 0) {
    const size_t bounced_bytes = std::min(part_bytes, kBounceBytes);
    const AlignedBytes bounce(bounced_bytes);
    file_.read(offset, bounce.get(), bounced_bytes);
    std::memcpy(bytes, bounce.get(), bounced_bytes);
    return bounced_bytes;
  }
  const size_t within = offset % kBlock;
  const AlignedBytes block(kBlock);
  const std::lock_guard lock(partial_block_);
  file_.read(offset - within, block.get(), kBlock);
  std::memcpy(bytes, block.get() + within, part_bytes);
  return part_bytes;
}

void DiskBackup::write(size_t offset, const std::byte* bytes, size_t size_bytes) {
  // Without alignment to mind, all of it is one request.
  if (!file_.is_direct()) return file_.write(offset, bytes, size_bytes);
  for (size_t done = 0; done < size_bytes;) {
    done += write_part(offset + done, bytes + done, part_at(offset + done, size_bytes - done));
  }
}

void DiskBackup::read(size_t offset, std::byte* bytes, size_t size_bytes) const {
  if (!file_.is_direct()) return file_.read(offset, bytes, size_bytes);
  for (size_t done = 0; done < size_bytes;) {
    done += read_part(offset + done, bytes + done, part_at(offset + done, size_bytes - done));
  }
}

std::byte* DiskBackup::view() {
  const std::lock_guard lock(view_mutex_);
  if (view_ == nullptr) view_ = file_.map();
  return view_;
}

}  // namespace

std::unique_ptr<Backup> DiskStore::open(size_t size_bytes) {
  return std::make_unique<DiskBackup>(BackupFile::create(disk_place(), size_bytes, calls_));
}

}  // namespace ebbtide
