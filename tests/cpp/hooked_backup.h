#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "store/store.h"

namespace ebbtide::testing {

// A backup in memory that calls a function before each write and each read. The function may throw as a store does.
class HookedBackup : public Backup {
 public:
  using Hook = std::function<void()>;
  HookedBackup(size_t size_bytes, Hook before_write, Hook before_read)
      : inner_(open_backup(BackupKind::kRam, size_bytes)),
        before_write_(std::move(before_write)),
        before_read_(std::move(before_read)) {}

  void write(size_t offset, const std::byte* bytes, size_t size_bytes) override {
    if (before_write_) before_write_();
    inner_->write(offset, bytes, size_bytes);
  }
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const override {
    if (before_read_) before_read_();
    inner_->read(offset, bytes, size_bytes);
  }
  void discard(size_t offset, size_t size_bytes) noexcept override { inner_->discard(offset, size_bytes); }
  std::byte* view() override { return inner_->view(); }

 private:
  const std::unique_ptr<Backup> inner_;
  const Hook before_write_;
  const Hook before_read_;
};

}  // namespace ebbtide::testing
