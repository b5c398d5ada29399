#include "core/budget/ledger.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.h"
#include "base/private_files.h"

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

// A store into a page for which a full file system has no room ends the process: so the room is taken before.
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

}  // namespace

struct Ledger::Header {
  std::atomic<uint64_t> magic;
  uint32_t version, header_bytes, slot_bytes, slot_count;
  std::atomic<uint32_t> used_slots;  // no slot from here on was ever taken
};

struct Ledger::Slot {
  std::atomic<uint64_t> promised_bytes, touched_bytes, uncharged_bytes;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

Ledger::Header& Ledger::header() const { return *static_cast<Header*>(mapping_); }

Ledger::Slot& Ledger::slot(uint32_t index) const {
  return *reinterpret_cast<Slot*>(static_cast<std::byte*>(mapping_) + offset_of_slot(index));
}

std::unique_ptr<Ledger> Ledger::open(const std::string& path) {
  while (true) {
    const int lock_file =
        PrivateFiles::instance().open([&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600); });
    if (lock_file < 0) throw_system_error(path, "open");
    std::unique_ptr<Ledger> ledger(new Ledger(lock_file));
    const Turn turn = ledger->take_turn();
    // Another run removed it before we had a lock on it: who opens it from now on has another file.
    if (!has_name(lock_file)) continue;
    grow_or_check(lock_file, path);
    take_page(lock_file, 0, path);
    ledger->map(path);
    ledger->check_or_make_header(path);
    ledger->take_slot(path);
    return ledger;
  }
}

// The mapping keeps its file open in forked children too: it must not be the one that the locks hang on, yet the same
// file.
void Ledger::map(const std::string& path) {
  const auto held = PrivateFiles::instance().hold_forks();
  const int map_file = ::open(("/proc/self/fd/" + std::to_string(lock_file_)).c_str(), O_RDWR | O_CLOEXEC);
  if (map_file < 0) throw_system_error(path, "open");
  void* mapping = ::mmap(nullptr, kFileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, map_file, 0);
  const int error = errno;
  ::close(map_file);
  if (mapping == MAP_FAILED) throw_system_error(path, "mmap", error);
  mapping_ = mapping;
}

void Ledger::check_or_make_header(const std::string& path) {
  Header& found = header();
  if (found.magic.load() == 0) make_whole(path);
  if (found.magic.load() != kMagic || found.version != kVersion || found.slot_count != kSlotCount)
    throw_no_ledger(path);
}

void Ledger::take_slot(const std::string& path) {
  for (uint32_t index = 0; index < kSlotCount; ++index) {
    if (!try_lock(lock_file_, offset_of_slot(index))) continue;
    take_page(lock_file_, offset_of_slot(index), path);
    own_slot_ = index;
    publish({});
    if (header().used_slots.load() <= index) header().used_slots.store(index + 1);
    return;
  }
  throw StateError("all " + std::to_string(kSlotCount) + " slots of the ledger " + path + " are taken");
}

Ledger::~Ledger() {
  PrivateFiles::instance().close(lock_file_, [&] { ::close(lock_file_); });
  if (mapping_ != nullptr) ::munmap(mapping_, kFileBytes);
}

Ledger::Turn::~Turn() {
  if (file_ < 0) return;
  struct flock lock = byte_lock(F_UNLCK, 0);
  ::fcntl(file_, F_OFD_SETLK, &lock);
}

Ledger::Turn Ledger::take_turn() const {
  struct flock lock = byte_lock(F_WRLCK, 0);
  while (::fcntl(lock_file_, F_OFD_SETLKW, &lock) != 0) {
    if (errno != EINTR) throw StateError(std::string("the ledger's lock can't be taken: ") + std::strerror(errno));
  }
  return Turn(lock_file_);
}

// Somebody may have made it shorter, and an access behind its end, or into a page that a full file system can't give,
// would end the process. The number comes last when it is made whole.
bool Ledger::is_whole() const noexcept {
  struct stat found{};
  uint64_t magic = 0;
  return ::fstat(lock_file_, &found) == 0 && found.st_size >= static_cast<off_t>(kFileBytes) &&
         ::pread(lock_file_, &magic, sizeof(magic), 0) == sizeof(magic) && magic == kMagic;
}

void Ledger::mend() const {
  if (!is_whole()) make_whole("of this run");
}

// The room of all slots that are taken, then the size, then what the header says.
void Ledger::make_whole(const std::string& path) const {
  uint32_t used = own_slot_ < kSlotCount ? own_slot_ + 1 : 0;
  for (uint32_t index = used; index < kSlotCount; ++index) {
    if (is_locked_by_another(lock_file_, offset_of_slot(index))) used = index + 1;
  }
  take_page(lock_file_, 0, path);
  for (uint32_t index = 0; index < used; ++index) take_page(lock_file_, offset_of_slot(index), path);
  grow(lock_file_, path);
  Header& fresh = header();
  fresh.version = kVersion;
  fresh.header_bytes = fresh.slot_bytes = kPageBytes;
  fresh.slot_count = kSlotCount;
  fresh.used_slots.store(used);
  fresh.magic.store(kMagic);
}

policy::HostHoldings Ledger::others() const {
  policy::HostHoldings sum;
  if (!is_whole()) return sum;
  const uint32_t used = std::min(header().used_slots.load(), kSlotCount);
  for (uint32_t index = 0; index < used; ++index) {
    if (index == own_slot_ || !is_locked_by_another(lock_file_, offset_of_slot(index))) continue;
    const Slot& other = slot(index);
    sum.promised_bytes = saturating_add(sum.promised_bytes, other.promised_bytes.load());
    sum.touched_bytes = saturating_add(sum.touched_bytes, other.touched_bytes.load());
    sum.uncharged_bytes = saturating_add(sum.uncharged_bytes, other.uncharged_bytes.load());
  }
  return sum;
}

// What is touched has grown before what is promised shrinks: who looks in between sees too much, never too little.
void Ledger::publish(const policy::HostHoldings& mine) noexcept {
  if (!is_whole()) return;  // until the next claim has mended it
  Slot& own = slot(own_slot_);
  own.touched_bytes.store(mine.touched_bytes);
  own.uncharged_bytes.store(mine.uncharged_bytes);
  own.promised_bytes.store(mine.promised_bytes);
}

}  // namespace ebbtide
