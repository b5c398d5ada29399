#include "core/budget/ledger.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"
#include "base/private_files.h"
#include "base/quiet_write.h"

namespace ebbtide {
namespace {

constexpr uint64_t kMagic = 0x656262746c646772ULL;
constexpr uint32_t kVersion = 1;
constexpr uint32_t kPageBytes = 4096;  // the header's and a slot's size: there is room for more in both
constexpr size_t kFileBytes = static_cast<size_t>(kPageBytes) * (1 + Ledger::kSlotCount);

[[noreturn]] void throw_system_error(const std::string& path, const char* what, int error = errno) {
  throw StateError("the ledger " + path + ": " + what + " failed: " + std::strerror(error));
}

bool has_name(int file) {
  struct stat found{};
  return ::fstat(file, &found) == 0 && found.st_nlink > 0;
}

// What another user made is not ours to write, whoever may.
void check_owner(int file, const std::string& path) {
  struct stat found{};
  if (::fstat(file, &found) != 0) throw_system_error(path, "fstat");
  if (!S_ISREG(found.st_mode) || found.st_uid != ::geteuid())
    throw StateError("the ledger " + path + " is no file of this user: give EBBTIDE_LEDGER a path of your own");
}

[[noreturn]] void throw_no_ledger(const std::string& path) {
  throw StateError("the ledger " + path + " is none, or another version's: give each run a file of its own");
}

// Zeros: who made it ended before it was done.
bool has_magic_or_zeros(int file) {
  std::array<unsigned char, kPageBytes> page{};
  if (::pread(file, page.data(), page.size(), 0) != static_cast<ssize_t>(page.size())) return false;
  uint64_t magic = 0;
  std::memcpy(&magic, page.data(), sizeof(magic));
  return magic == kMagic || std::all_of(page.begin(), page.end(), [](unsigned char byte) { return byte == 0; });
}

// Sparse: a page gets its memory when it is needed.
void grow(int file, const std::string& path) {
  struct rlimit limit{};
  // Asked, since the kernel answers a file beyond it with a signal.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < kFileBytes) throw_system_error(path, "growing", EFBIG);
  if (::ftruncate(file, kFileBytes) != 0) throw_system_error(path, "ftruncate");
}

// The path may name a file that is none of ours: only an empty one is changed before it is known.
void grow_or_check(int file, const std::string& path) {
  const off_t size_bytes = ::lseek(file, 0, SEEK_END);
  if (size_bytes == 0) {
    grow(file, path);
  } else if (size_bytes != static_cast<off_t>(kFileBytes) || !has_magic_or_zeros(file)) {
    throw_no_ledger(path);
  }
}

// So that a full file system is an error when the file is opened, and not at a charge.
void take_page(int file, off_t offset, const std::string& path) {
  int error = 0;
  do {
    error = ::posix_fallocate(file, offset, kPageBytes);
  } while (error == EINTR);
  if (error != 0) throw_system_error(path, "taking room", error);
}

struct flock byte_lock(short type, off_t offset) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = 1;
  return lock;
}

off_t offset_of_slot(uint32_t index) { return static_cast<off_t>(kPageBytes) * (1 + static_cast<off_t>(index)); }

// False where somebody else has it.
bool try_lock(int file, off_t offset) {
  struct flock lock = byte_lock(F_WRLCK, offset);
  return ::fcntl(file, F_OFD_SETLK, &lock) == 0;
}

bool is_locked_by_another(int file, off_t offset) {
  struct flock lock = byte_lock(F_WRLCK, offset);
  return ::fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// 0 where the file is too short.
template <typename Value>
Value read_at(int file, off_t offset) noexcept {
  Value value{};
  return ::pread(file, &value, sizeof(value), offset) == sizeof(value) ? value : Value{};
}

template <typename Value>
bool write_at(int file, off_t offset, const Value& value) noexcept {
  return write_quietly([&] { return ::pwrite(file, &value, sizeof(value), offset); }) == sizeof(value);
}

}  // namespace

struct Ledger::Header {
  uint64_t magic;
  uint32_t version, header_bytes, slot_bytes, slot_count;
  uint32_t used_slots;  // no slot from here on was ever taken
};

namespace {

// A slot begins with what is promised; what is touched and uncharged follows.
struct Touched {
  uint64_t touched_bytes, uncharged_bytes;
};
constexpr off_t kTouchedOffset = sizeof(uint64_t);

}  // namespace

Ledger::Header Ledger::header() const noexcept { return read_at<Header>(file_, 0); }

std::unique_ptr<Ledger> Ledger::open(const std::string& path) {
  while (true) {
    const int file = PrivateFiles::instance().open(
        [&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600); });
    if (file < 0) throw_system_error(path, errno == ELOOP ? "open (it is a symbolic link)" : "open");
    std::unique_ptr<Ledger> ledger(new Ledger(file));
    check_owner(file, path);
    const Turn turn = ledger->take_turn();
    // Another run removed it before we had a lock on it: who opens it from now on has another file.
    if (!has_name(file)) continue;
    grow_or_check(file, path);
    take_page(file, 0, path);
    ledger->check_or_make_header(path);
    ledger->take_slot(path);
    return ledger;
  }
}

void Ledger::check_or_make_header(const std::string& path) {
  if (header().magic == 0) make_whole(path);
  const Header found = header();
  if (found.magic != kMagic || found.version != kVersion || found.slot_count != kSlotCount) throw_no_ledger(path);
}

void Ledger::take_slot(const std::string& path) {
  for (uint32_t index = 0; index < kSlotCount; ++index) {
    if (!try_lock(file_, offset_of_slot(index))) continue;
    take_page(file_, offset_of_slot(index), path);
    own_slot_ = index;
    const bool is_told = header().used_slots > index || write_at(file_, offsetof(Header, used_slots), index + 1);
    if (!write({}) || !is_told) throw_system_error(path, "write");
    return;
  }
  throw StateError("all " + std::to_string(kSlotCount) + " slots of the ledger " + path + " are taken");
}

Ledger::~Ledger() {
  PrivateFiles::instance().close(file_, [&] { ::close(file_); });
}

Ledger::Turn::~Turn() {
  if (file_ < 0) return;
  struct flock lock = byte_lock(F_UNLCK, 0);
  ::fcntl(file_, F_OFD_SETLK, &lock);
}

Ledger::Turn Ledger::take_turn() const {
  struct flock lock = byte_lock(F_WRLCK, 0);
  while (::fcntl(file_, F_OFD_SETLKW, &lock) != 0) {
    if (errno != EINTR) throw StateError(std::string("the ledger's lock can't be taken: ") + std::strerror(errno));
  }
  return Turn(file_);
}

// Its owner may have made it shorter. The number comes last when it is made whole.
bool Ledger::is_whole() const noexcept {
  struct stat found{};
  return ::fstat(file_, &found) == 0 && found.st_size >= static_cast<off_t>(kFileBytes) && header().magic == kMagic;
}

void Ledger::mend() const {
  if (!is_whole()) make_whole("of this run");
}

// The room of all slots that are taken, then the size, then what the header says.
void Ledger::make_whole(const std::string& path) const {
  uint32_t used = own_slot_ < kSlotCount ? own_slot_ + 1 : 0;
  for (uint32_t index = used; index < kSlotCount; ++index) {
    if (is_locked_by_another(file_, offset_of_slot(index))) used = index + 1;
  }
  take_page(file_, 0, path);
  for (uint32_t index = 0; index < used; ++index) take_page(file_, offset_of_slot(index), path);
  grow(file_, path);
  const Header fresh = {0, kVersion, kPageBytes, kPageBytes, kSlotCount, used};
  if (!write_at(file_, 0, fresh) || !write_at(file_, offsetof(Header, magic), kMagic))
    throw_system_error(path, "write");
}

// What is promised is read before what is touched, and written after it: who looks in between sees too much, never too
// little.
policy::HostHoldings Ledger::others() const {
  policy::HostHoldings sum;
  if (!is_whole()) return sum;
  const uint32_t used = std::min(header().used_slots, kSlotCount);
  for (uint32_t index = 0; index < used; ++index) {
    const off_t offset = offset_of_slot(index);
    if (index == own_slot_ || !is_locked_by_another(file_, offset)) continue;
    sum.promised_bytes = saturating_add(sum.promised_bytes, read_at<uint64_t>(file_, offset));
    const auto touched = read_at<Touched>(file_, offset + kTouchedOffset);
    sum.touched_bytes = saturating_add(sum.touched_bytes, touched.touched_bytes);
    sum.uncharged_bytes = saturating_add(sum.uncharged_bytes, touched.uncharged_bytes);
  }
  return sum;
}

void Ledger::publish(const policy::HostHoldings& mine) noexcept {
  if (is_whole()) write(mine);  // else the next claim mends it
}

bool Ledger::write(const policy::HostHoldings& mine) const noexcept {
  const off_t offset = offset_of_slot(own_slot_);
  return write_at(file_, offset + kTouchedOffset, Touched{mine.touched_bytes, mine.uncharged_bytes}) &&
         write_at(file_, offset, mine.promised_bytes);
}

}  // namespace ebbtide
