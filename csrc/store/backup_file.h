#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/bytes.h"
#include "store/disk_directory.h"
#include "store/named_file.h"

// A file that holds one backup: of fixed size, its space claimed when it is created, without a name by default
// (named_file.h). A forked child has neither its descriptor (base/fork.h) nor its mapping, which would keep
// its space. Relied on: an unlinked file is freed with its last descriptor. Reads through a mapping see earlier writes
// of O_DIRECT, and the reverse: the kernel first writes out and drops the pages of the range.
namespace ebbtide {

// Calls whose results differ between file systems; tests pass functions that fail.
struct FileCalls {
  int (*open)(const char* path, int flags, mode_t mode);
  int (*set_flags)(int file, int flags);
  int (*fallocate)(int file, int mode, off_t offset, off_t size_bytes);
  ssize_t (*pwrite)(int file, const void* bytes, size_t size_bytes, off_t offset);
  ssize_t (*pread)(int file, void* bytes, size_t size_bytes, off_t offset);
  int (*write_back)(int file, off_t offset, off_t size_bytes);  // waits until the range is on the disk
  int (*close)(int file);
};
extern const FileCalls kSystemFileCalls;

// Whether files there are RAM (tmpfs, ramfs, hugetlbfs), by statfs's f_type.
bool is_memory_file_system(uint64_t type);

class BackupFile {
 public:
  // Offsets, sizes and addresses are multiples of this if the page cache is bypassed.
  static constexpr size_t kBlockBytes = 4096;
  // The smallest backup.
  static constexpr uint64_t kLeastFreeBytes = 2ULL << 20;

  // Throws StoreError if the directory accepts no file of this size (rounded up to blocks), or is in memory itself and
  // may not be. If it is refused, it waits for discarded files to be closed and tries again. calls must never be
  // destroyed.
  static BackupFile create(const DiskPlace& place, size_t size_bytes, const FileCalls& calls);
  // Throws as create() would if the directory accepts no file, or is in memory itself and may not be. Leaves nothing
  // there, and makes no file with a name. A disk with less than least_bytes free is a warning on stderr: there may be
  // more by the time of a backup.
  static void check_directory(const DiskPlace& place, uint64_t least_bytes = kLeastFreeBytes);
  BackupFile(BackupFile&& other) noexcept;
  BackupFile& operator=(BackupFile&&) = delete;
  // Its space is freed in the background.
  ~BackupFile();

  // False if the file system does not support O_DIRECT. Then no alignment is required, and written bytes are on the
  // disk and out of the page cache when write() returns.
  bool is_direct() const { return is_direct_; }
  // Moves all of it or throws StoreError. If is_direct(), in whole blocks, from and to memory aligned to blocks.
  void write(size_t offset, const std::byte* bytes, size_t size_bytes) const;
  void read(size_t offset, std::byte* bytes, size_t size_bytes) const;
  // Frees the blocks that lie wholly in the range, if the file system can. They then read as zeros, and writing them
  // takes new space (reclaim).
  void punch(size_t offset, size_t size_bytes) const noexcept;
  // Claims the space that was freed in this range, if the file system can claim space. Throws StoreError.
  void reclaim(size_t offset, size_t size_bytes) const;
  // Maps the whole file, shared and writable, until munmap of size_bytes(). By one thread at a time. Throws StoreError.
  std::byte* map() const;
  size_t size_bytes() const { return size_bytes_; }

 private:
  BackupFile(const DiskPlace& place, size_t size_bytes, const FileCalls& calls);
  void make();
  void open_with_name();
  void open_nameless();
  void refuse_memory() const;
  void warn_of_memory() const;
  bool is_in_memory() const;
  void claim_space() const;
  int try_claim(size_t offset, size_t size_bytes) const;
  void try_direct();
  size_t moved_bytes(size_t count, const char* call) const;
  [[noreturn]] void refuse(const std::string& text, uint64_t free_bytes = 0, uint64_t limit_bytes = kUnlimited) const;
  [[noreturn]] void throw_error(const char* call, int error) const;
  [[noreturn]] void throw_not_opened(int error) const;
  [[noreturn]] void throw_truncated() const;

  DiskPlace place_;
  size_t size_bytes_;
  const FileCalls* calls_;
  FileName name_;  // none unless the place says so
  int file_ = -1;
  bool is_direct_ = false;
  bool is_made_ = false;
};

}  // namespace ebbtide
