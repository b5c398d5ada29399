#include "core/budget/ledger.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/fork.h"

namespace ebbtide {
namespace {

constexpr uint64_t kMagic = 0x656262746c646772ULL;
constexpr uint32_t kVersion = 2;
constexpr int kTries = 1000;  // for a slot that another process writes just now

struct Header {
  uint64_t magic = kMagic;
  uint32_t version = kVersion;
  uint32_t slot_count = Ledger::kSlotCount;
  std::array<uint64_t, 6> reserved{};
};
static_assert(sizeof(Header) == Ledger::kHeaderBytes);

struct Slot {
  uint64_t promised_bytes = 0, touched_bytes = 0, uncharged_bytes = 0, check = 0;
};
static_assert(sizeof(Slot) == Ledger::kSlotBytes);

// Never that of zeros.
uint64_t check_of(const Slot& slot) {
  return kMagic ^ slot.promised_bytes ^ std::rotl(slot.touched_bytes, 21) ^ std::rotl(slot.uncharged_bytes, 42);
}

Slot slot_of(const policy::HostHoldings& mine) {
  Slot slot{mine.promised_bytes, mine.touched_bytes, mine.uncharged_bytes};
  slot.check = check_of(slot);
  return slot;
}

[[noreturn]] void throw_system_error(const std::string& path, const char* what) {
  throw StateError("the ledger " + path + ": " + what + " failed: " + std::strerror(errno));
}

[[noreturn]] void throw_no_ledger(const std::string& path, const char* why = "is none, or another version's") {
  throw StateError("the ledger " + path + " " + why + ": give each run a file of its own");
}

// Bytes behind the file's end stay as they are.
template <typename Value>
bool read_at(int file, off_t offset, Value& value) noexcept {
  ssize_t count = -1;
  do {
    count = ::pread(file, &value, sizeof(value), offset);
  } while (count < 0 && errno == EINTR);
  return count >= 0;
}

template <typename Value>
bool write_at(int file, off_t offset, const Value& value) noexcept {
  struct rlimit limit{};
  // Asked, since the kernel answers a write beyond it with a signal.
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < Ledger::kFileBytes) {
    errno = EFBIG;
    return false;
  }
  ssize_t count = -1;
  do {
    count = ::pwrite(file, &value, sizeof(value), offset);
  } while (count < 0 && errno == EINTR);
  if (count >= 0 && count < static_cast<ssize_t>(sizeof(value))) errno = ENOSPC;
  return count == sizeof(value);
}

Header read_header(int file) noexcept {
  Header found{0, 0, 0, {}};
  read_at(file, 0, found);
  return found;
}

bool is_ours(const Header& header) noexcept {
  return header.magic == kMagic && header.version == kVersion && header.slot_count == Ledger::kSlotCount;
}

struct flock byte_lock(short type, off_t offset) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = offset;
  lock.l_len = 1;
  return lock;
}

off_t offset_of_slot(uint32_t index) {
  return static_cast<off_t>(Ledger::kHeaderBytes + Ledger::kSlotBytes * static_cast<size_t>(index));
}

// False if another process has it.
bool try_lock(int file, off_t offset) {
  struct flock lock = byte_lock(F_WRLCK, offset);
  return ::fcntl(file, F_OFD_SETLK, &lock) == 0;
}

bool is_locked_by_another(int file, off_t offset) {
  struct flock lock = byte_lock(F_WRLCK, offset);
  return ::fcntl(file, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// Nothing if the process reported nothing, or its report is gone.
policy::HostHoldings told(int file, uint32_t index, Slot slot) noexcept {
  const Slot empty;
  for (int tries = 0; slot.check != check_of(slot); ++tries) {
    if (tries == kTries || std::memcmp(&slot, &empty, sizeof(slot)) == 0) return {};
    ::sched_yield();
    slot = empty;
    read_at(file, offset_of_slot(index), slot);
  }
  return {slot.promised_bytes, slot.touched_bytes, slot.uncharged_bytes};
}

}  // namespace

std::unique_ptr<Ledger> Ledger::open(const std::string& path) {
  while (true) {
    // Not blocking: it might be a pipe, or a device.
    constexpr int kFlags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    const int file = PrivateFiles::instance().open([&] { return ::open(path.c_str(), kFlags, 0600); });
    if (file < 0 && errno == ELOOP) throw_no_ledger(path, "is a symbolic link");
    if (file < 0) throw_system_error(path, "open");
    struct stat found{};
    const bool is_found = ::fstat(file, &found) == 0;
    std::unique_ptr<Ledger> ledger(new Ledger(file, found.st_dev, found.st_ino));
    if (!is_found) throw_system_error(path, "fstat");
    if (!S_ISREG(found.st_mode)) throw_no_ledger(path);
    if (found.st_uid != ::geteuid()) throw_no_ledger(path, "is another user's");
    const Turn turn = ledger->take_turn();
    // Another run removed it before we had a lock on it: processes that open it from now on have another file.
    if (::fstat(file, &found) == 0 && found.st_nlink == 0) continue;
    ledger->check_or_make_header(path);
    ledger->take_slot(path);
    return ledger;
  }
}

// The path may name a file that is not ours: until that is known, only an empty one is changed.
void Ledger::check_or_make_header(const std::string& path) const {
  const Header found = read_header(file_);
  if (is_ours(found)) return;
  const Header zeros{0, 0, 0, {}};
  const off_t size_bytes = ::lseek(file_, 0, SEEK_END);
  if (std::memcmp(&found, &zeros, sizeof(found)) != 0 || size_bytes > static_cast<off_t>(kFileBytes))
    throw_no_ledger(path);
  if (!write_at(file_, 0, Header())) throw_system_error(path, "writing");
}

void Ledger::take_slot(const std::string& path) {
  for (uint32_t index = 0; index < kSlotCount; ++index) {
    if (!try_lock(file_, offset_of_slot(index))) continue;
    if (!write_at(file_, offset_of_slot(index), slot_of({}))) throw_system_error(path, "writing");
    own_slot_ = index;
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

// Programs that close all files may have another one under its number.
bool Ledger::is_open() const noexcept {
  struct stat found{};
  return ::fstat(file_, &found) == 0 && found.st_dev == device_ && found.st_ino == inode_;
}

Ledger::Turn Ledger::take_turn() const {
  if (!is_open()) return Turn(-1);
  struct flock lock = byte_lock(F_WRLCK, 0);
  while (::fcntl(file_, F_OFD_SETLKW, &lock) != 0) {
    if (errno != EINTR) throw StateError(std::string("the ledger's lock can't be taken: ") + std::strerror(errno));
  }
  return Turn(file_);
}

void Ledger::mend() const {
  if (is_ours(read_header(file_)) || !is_open()) return;
  if (!write_at(file_, 0, Header())) throw_system_error("of this run", "writing");
}

policy::HostHoldings Ledger::others() const noexcept {
  policy::HostHoldings sum;
  if (!is_ours(read_header(file_))) return sum;
  static constexpr Slot kBlank{};
  std::array<Slot, kSlotCount> slots{};
  read_at(file_, offset_of_slot(0), slots);
  for (uint32_t index = 0; index < kSlotCount; ++index) {
    // Most were never taken, which takes no call to see.
    const bool is_blank = std::memcmp(&slots[index], &kBlank, sizeof kBlank) == 0;
    if (index == own_slot_ || is_blank || !is_locked_by_another(file_, offset_of_slot(index))) continue;
    sum = policy::sum(sum, told(file_, index, slots[index]));
  }
  return sum;
}

void Ledger::publish(const policy::HostHoldings& mine) const noexcept {
  if (is_ours(read_header(file_))) write_at(file_, offset_of_slot(own_slot_), slot_of(mine));
}

}  // namespace ebbtide
