#include "store/disk_store.h"

#include <sys/mman.h>

#include <mutex>

namespace ebbtide {
namespace {

class DiskBackup : public Backup {
 public:
  explicit DiskBackup(BackupFile file) : file_(std::move(file)) {}
  DiskBackup(const DiskBackup&) = delete;
  DiskBackup& operator=(const DiskBackup&) = delete;
  ~DiskBackup() override {
    if (view_ != nullptr) ::munmap(view_, file_.size_bytes());
  }

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    file_.write(offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    file_.read(offset, bytes, size_bytes);
  }
  void discard(size_t offset, size_t size_bytes) noexcept override { file_.punch(offset, size_bytes); }
  void reclaim(size_t offset, size_t size_bytes) override { file_.reclaim(offset, size_bytes); }
  std::byte* view() override;

 private:
  const BackupFile file_;
  std::mutex view_mutex_;
  std::byte* view_ = nullptr;
};

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
