#include "store/backup_file.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/text.h"
#include "store/aligned_bytes.h"
#include "store/closing_files.h"
#include "store/disk_directory.h"

namespace ebbtide {
namespace {

int open_file(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
int set_file_flags(int file, int flags) { return ::fcntl(file, F_SETFL, flags); }
int write_back_range(int file, off_t offset, off_t size_bytes) {
  return ::sync_file_range(file, offset, size_bytes,
                           SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
}

// Checked first, because exceeding this limit raises a signal that ends the process.
uint64_t size_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur : kUnlimited;
}

bool is_full(int error) { return error == ENOSPC || error == EDQUOT; }

// Waits until all discarded files are closed. Returns whether any was closed since count was read: their space or
// descriptors may make room.
bool have_more_closed(uint64_t& count) noexcept {
  wait_until_closed();
  return std::exchange(count, files_closed()) != count;
}

const char* advice_on(int error) {
  switch (error) {
    case ENOENT:
    case ENOTDIR: return "make that directory";
    case EACCES:
    case EPERM: return "see to its permissions";
    case EMFILE:
    case ENFILE: return "raise `ulimit -n` (each backup is a file)";
    default: return "look at that directory";
  }
}

// For messages, which are text and of limited length.
std::string shown(const std::string& directory) {
  return is_utf8(directory) ? "'" + std::string(cut_utf8(directory, 256)) + "'" : "a directory whose name is no UTF-8";
}

uint64_t free_bytes_of(int file) {
  struct statvfs info{};
  return ::fstatvfs(file, &info) == 0 ? static_cast<uint64_t>(info.f_bavail) * info.f_frsize : kUnlimited;
}

}  // namespace

const FileCalls kSystemFileCalls = {open_file, set_file_flags,   ::fallocate, ::pwrite,
                                    ::pread,   write_back_range, ::close};

bool is_memory_file_system(uint64_t type) {
  constexpr uint64_t kTmpfs = 0x01021994;
  constexpr uint64_t kRamfs = 0x858458f6;
  constexpr uint64_t kHugetlbfs = 0x958458f6;
  return type == kTmpfs || type == kRamfs || type == kHugetlbfs;
}

BackupFile::BackupFile(const DiskPlace& place, size_t size_bytes, const FileCalls& calls)
    : place_(place), size_bytes_(size_bytes), calls_(&calls) {}

BackupFile BackupFile::create(const DiskPlace& place, size_t size_bytes, const FileCalls& calls) {
  for (uint64_t closed = files_closed();;) {
    try {
      BackupFile file(place, round_up(size_bytes, kBlockBytes), calls);
      file.make();
      return file;
    } catch (const StoreError&) {
      if (!have_more_closed(closed)) throw;
    }
  }
}

void BackupFile::check_directory(const DiskPlace& place, uint64_t least_bytes) {
  BackupFile file(place, 0, kSystemFileCalls);
  file.open_nameless();
  file.refuse_memory();
  const uint64_t free_bytes = free_bytes_of(file.file_);
  if (free_bytes >= least_bytes) return;
  log_line(LogLevel::kWarning, {"the disk of ", shown(place.directory), " has ", format_bytes(free_bytes),
                                " free: disk backups there need more"});
}

void BackupFile::make() {
  place_.files == DiskFiles::kNamed ? open_with_name() : open_nameless();
  refuse_memory();
  warn_of_memory();
  claim_space();
  try_direct();
  is_made_ = true;
}

BackupFile::BackupFile(BackupFile&& other) noexcept
    : place_(std::move(other.place_)),
      size_bytes_(other.size_bytes_),
      calls_(other.calls_),
      name_(std::move(other.name_)),
      file_(std::exchange(other.file_, -1)),
      is_direct_(other.is_direct_),
      is_made_(other.is_made_) {}

BackupFile::~BackupFile() {
  if (file_ < 0) return;
  if (is_made_) {
    close_later(file_, size_bytes_, *calls_);
  } else {
    PrivateFiles::instance().close(file_, [&] { calls_->close(file_); });
  }
}

void BackupFile::open_nameless() {
  std::string name = place_.directory + "/ebbtide-XXXXXX";
  file_ = PrivateFiles::instance().open([&] {
    const int file = calls_->open(place_.directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
    const int named = ::mkostemp(name.data(), O_CLOEXEC);
    if (named >= 0) ::unlink(name.c_str());
    return named;
  });
  if (file_ < 0) throw_not_opened(errno);
}

void BackupFile::open_with_name() {
  file_ = open_named(place_.directory, *calls_, name_);
  if (file_ < 0) throw_not_opened(errno);
}

void BackupFile::refuse(const std::string& text, uint64_t free_bytes, uint64_t limit_bytes) const {
  throw StoreError(text, {size_bytes_, free_bytes, limit_bytes}, Cause::kDiskDirectory);
}

void BackupFile::throw_not_opened(int error) const {
  refuse("no file for a backup can be made in " + shown(place_.directory) + ": " + std::strerror(error) + ". Either " +
         advice_on(error) + ", " + advice_on_disk_directory(place_.directory));
}

bool BackupFile::is_in_memory() const {
  struct statfs info{};
  return ::fstatfs(file_, &info) == 0 && is_memory_file_system(static_cast<uint64_t>(info.f_type));
}

void BackupFile::refuse_memory() const {
  if (place_.may_be_memory || !is_in_memory()) return;
  refuse(shown(place_.directory) +
         " is no disk but RAM (tmpfs), which no budget would count: " + advice_on_disk_directory(place_.directory));
}

void BackupFile::warn_of_memory() const {
  static constinit std::atomic<bool> is_said{false};
  if (!is_in_memory() || is_said.exchange(true)) return;
  log_line(LogLevel::kWarning, {"the folder of disk backups, ", shown(place_.directory),
                                ", is no disk but RAM (tmpfs): backups there take host memory that no budget counts"});
}

void BackupFile::claim_space() const {
  if (size_bytes_ > size_limit()) throw_error("fallocate", EFBIG);
  // Some file systems would first fill up and only then report that it was too much.
  if (free_bytes_of(file_) < size_bytes_) throw_error("fallocate", ENOSPC);
  const int error = try_claim(0, size_bytes_);
  if (error == 0) return;
  if (error != EOPNOTSUPP) throw_error("fallocate", error);
  // This file system can't claim space. If another program takes it meanwhile, a write will fail.
  if (::ftruncate(file_, static_cast<off_t>(size_bytes_)) != 0) throw_error("ftruncate", errno);
}

// An error number, or 0.
int BackupFile::try_claim(size_t offset, size_t size_bytes) const {
  int result = 0;
  do {
    result = calls_->fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(size_bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0 ? 0 : errno;
}

void BackupFile::reclaim(size_t offset, size_t size_bytes) const {
  uint64_t closed = files_closed();
  int error = try_claim(offset, size_bytes);
  if (is_full(error) && have_more_closed(closed)) error = try_claim(offset, size_bytes);
  if (error != 0 && error != EOPNOTSUPP) throw_error("fallocate", error);
}

// Some file systems accept the flag and refuse the first request. So one is made before several threads write.
void BackupFile::try_direct() {
  const int flags = ::fcntl(file_, F_GETFL);
  if (flags < 0 || calls_->set_flags(file_, flags | O_DIRECT) != 0) return;
  const AlignedBytes zeros(kBlockBytes);
  std::memset(zeros.get(), 0, kBlockBytes);
  ssize_t count = 0;
  do {
    count = calls_->pwrite(file_, zeros.get(), kBlockBytes, 0);
  } while (count < 0 && errno == EINTR);
  is_direct_ = count == static_cast<ssize_t>(kBlockBytes);
  if (!is_direct_ && calls_->set_flags(file_, flags) != 0) throw_error("fcntl", errno);
}

// A request that ended early goes on at a block's boundary. One that moves nothing would go on for ever.
size_t BackupFile::moved_bytes(size_t count, const char* call) const {
  const size_t moved = is_direct_ ? count / kBlockBytes * kBlockBytes : count;
  if (moved == 0) throw_error(call, EIO);
  return moved;
}

void BackupFile::write(size_t offset, const std::byte* bytes, size_t size_bytes) const {
  if (offset + size_bytes > size_limit()) throw_error("pwrite", EFBIG);  // it may have been lowered since
  uint64_t closed = files_closed();
  for (size_t done = 0; done < size_bytes;) {
    const ssize_t count = calls_->pwrite(file_, bytes + done, size_bytes - done, static_cast<off_t>(offset + done));
    const int error = count < 0 ? errno : 0;
    if (error == EINTR || (is_full(error) && have_more_closed(closed))) continue;
    if (error != 0) throw_error("pwrite", error);
    done += moved_bytes(static_cast<size_t>(count), "pwrite");
  }
  if (is_direct_) return;
  // Written to the disk here, so that a disk error is reported while the bytes still exist elsewhere, and so that RAM
  // does not hold them twice.
  if (calls_->write_back(file_, static_cast<off_t>(offset), static_cast<off_t>(size_bytes)) != 0) {
    throw_error("sync_file_range", errno);
  }
  ::posix_fadvise(file_, static_cast<off_t>(offset), static_cast<off_t>(size_bytes), POSIX_FADV_DONTNEED);
}

void BackupFile::read(size_t offset, std::byte* bytes, size_t size_bytes) const {
  for (size_t done = 0; done < size_bytes;) {
    const ssize_t count = calls_->pread(file_, bytes + done, size_bytes - done, static_cast<off_t>(offset + done));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw_error("pread", errno);
    if (count == 0) throw_truncated();
    done += moved_bytes(static_cast<size_t>(count), "pread");
  }
}

void BackupFile::punch(size_t offset, size_t size_bytes) const noexcept {
  const size_t begin = round_up(offset, kBlockBytes);
  const size_t end = (offset + size_bytes) / kBlockBytes * kBlockBytes;
  if (begin >= end) return;
  calls_->fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                    static_cast<off_t>(end - begin));
}

std::byte* BackupFile::map() const {
  struct stat found{};
  if (::fstat(file_, &found) == 0 && found.st_size < static_cast<off_t>(size_bytes_)) throw_truncated();
  // Writable: torch has no read-only tensors, and nothing could catch a write to read-only pages.
  void* mapping = ::mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapping == MAP_FAILED) throw_error("mmap", errno);
  ::madvise(mapping, size_bytes_, MADV_DONTFORK);  // as base/fork.h says of its descriptor
  return static_cast<std::byte*>(mapping);
}

void BackupFile::throw_truncated() const {
  refuse("the file of a backup in " + shown(place_.directory) +
         " is shorter than the backup: it was truncated, and its content is lost. Free the memory that it belongs to, "
         "trim the tag, and load the content anew");
}

void BackupFile::throw_error(const char* call, int error) const {
  const std::string reason = std::strerror(error);
  const std::string directory = shown(place_.directory);
  const std::string advice = advice_on_disk_directory(place_.directory);
  if (is_full(error)) {
    const uint64_t free_bytes = free_bytes_of(file_);
    refuse("the disk of " + directory + " has too little space for a backup: " + format_bytes(size_bytes_) +
               " wanted, " + format_bytes(free_bytes) + " free (" + reason + "). Free some there, " + advice,
           free_bytes);
  }
  if (error == EFBIG) {
    refuse("files in " + directory + " may not have the " + format_bytes(size_bytes_) + " of a backup: " + reason +
               ". Raise `ulimit -f`, " + advice,
           0, size_limit());
  }
  refuse(std::string(call) + " failed for a backup in " + directory + ": " + reason + ". If it stays so, " + advice);
}

}  // namespace ebbtide
