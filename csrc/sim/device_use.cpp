#include "sim/device_use.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.h"
#include "base/settings.h"
#include "sim/quirks.h"

namespace ebbtide::sim {
namespace {

constexpr std::chrono::milliseconds kLateness{40};
constexpr uint64_t kDefaultCapacity = 1ull << 30;
constexpr int kSlots = 64;       // bits of a row's holders
constexpr size_t kRows = 32768;  // 64 GiB in handles of one granule
constexpr uint64_t kMagic = 0x656262746c736401;

constexpr off_t kTurnByte = 0;
constexpr off_t byte_of_slot(int slot) { return 1 + slot; }
constexpr uint64_t bit_of(int slot) { return 1ull << slot; }

// Of one process, not of an open file: forked children do not share them.
struct flock lock_of(short type, off_t byte) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

bool try_lock(int file, off_t byte) {
  struct flock lock = lock_of(F_WRLCK, byte);
  return fcntl(file, F_SETLK, &lock) == 0;
}

bool is_locked_by_another(int file, off_t byte) {
  struct flock lock = lock_of(F_WRLCK, byte);
  return fcntl(file, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

// Makes the pages, too: those that /dev/shm has no room for would end a process that writes to them. 0, or the error.
int extend(int file, off_t bytes) {
  rlimit limit{};
  // The system answers a longer file than this with a signal.
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < static_cast<rlim_t>(bytes)) return EFBIG;
  return posix_fallocate(file, 0, bytes);
}

void refuse(const std::string& path, const char* why) {
  log_line(LogLevel::kError, {"the simulated devices of EBBTIDE_SIM_SHARED can't be shared: ", path, ": ", why});
}

}  // namespace

struct DeviceUse::Table {
  struct Row {
    std::atomic<uint64_t> holders;  // bits of slots; the rest means nothing while there are none
    uint64_t key, bytes, device;
  };
  using Amounts = std::array<std::atomic<uint64_t>, kMaxDevices>;

  uint64_t magic;
  Amounts capacity;
  std::atomic<uint64_t> slots;       // bits of those that a process took, until it is forgotten
  std::atomic<uint64_t> row_count;   // of rows that were ever used
  std::array<Amounts, kSlots> used;  // by one process alone
  std::array<Row, kRows> rows;

  Row* find(uint64_t key) {
    for (uint64_t index = 0; index < row_count; ++index) {
      if (rows[index].key == key && rows[index].holders != 0) return &rows[index];
    }
    return nullptr;
  }
  Row* find_free() {
    for (uint64_t index = 0; index < row_count; ++index) {
      if (rows[index].holders == 0) return &rows[index];
    }
    return row_count < kRows ? &rows[row_count++] : nullptr;
  }
};

// While it lives, no other thread or process changes the table.
class DeviceUse::Turn {
 public:
  explicit Turn(DeviceUse& use) : lock_(use.mutex_), file_(use.file_) {
    if (file_ < 0) return;
    struct flock lock = lock_of(F_WRLCK, kTurnByte);
    while (fcntl(file_, F_SETLKW, &lock) != 0 && errno == EINTR) {
    }
  }
  ~Turn() {
    if (file_ < 0) return;
    struct flock lock = lock_of(F_UNLCK, kTurnByte);
    fcntl(file_, F_SETLK, &lock);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  const int file_;
};

DeviceUse::~DeviceUse() { close_table(); }

void DeviceUse::reset() noexcept {
  {
    const Turn turn(*this);
    end_late(true);
  }
  close_table();
  const uint64_t capacity = read_number(Setting::kSimCapacity).value_or(kDefaultCapacity);
  for (int device = 0; device < kMaxDevices; ++device) {
    own_[device] = 0;
    capacity_[device] = capacity;
  }
}

void DeviceUse::close_table() noexcept {
  if (slot_ >= 0) {
    const Turn turn(*this);
    forget_slot(slot_);
  }
  if (table_ != nullptr) munmap(table_, sizeof(Table));
  if (file_ >= 0) close(file_);
  table_ = nullptr;
  file_ = slot_ = -1;
}

bool DeviceUse::open() {
  if (table_ != nullptr) return true;
  owner_ = {static_cast<uint64_t>(getpid()), false};
  const auto name = read_variable(Setting::kSimShared);
  if (!name) return true;
  const std::string path = "/dev/shm/ebbtide-sim-" + std::to_string(geteuid()) + "-" + *name;
  if (open_table(path)) return true;
  close_table();
  return false;
}

bool DeviceUse::open_table(const std::string& path) {
  file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  struct stat found{};
  if (file_ < 0 || fstat(file_, &found) != 0) return refuse(path, strerror(errno)), false;
  if (!S_ISREG(found.st_mode) || found.st_uid != geteuid()) return refuse(path, "another user's, or no file"), false;
  const Turn turn(*this);
  if (found.st_size != 0 && found.st_size != sizeof(Table)) return refuse(path, "another version's"), false;
  if (const int failed = extend(file_, sizeof(Table)); failed != 0) return refuse(path, strerror(failed)), false;
  void* const mapping = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapping == MAP_FAILED) return refuse(path, strerror(errno)), false;
  auto* const table = static_cast<Table*>(mapping);
  if (table->magic != kMagic && table->magic != 0) {
    munmap(mapping, sizeof(Table));
    return refuse(path, "another version's"), false;
  }
  table->magic = kMagic;
  table_ = table;
  owner_ = {found.st_ino, true};
  return take_slot() || (refuse(path, "too many processes"), false);
}

// Whoever comes first says what the devices have.
bool DeviceUse::take_slot() {
  bool is_first = true;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (is_locked_by_another(file_, byte_of_slot(slot))) {
      is_first = false;
    } else if (slot_ < 0 && try_lock(file_, byte_of_slot(slot))) {
      slot_ = slot;
    }
  }
  if (slot_ < 0) return false;
  forget_dead();
  forget_slot(slot_);
  table_->slots |= bit_of(slot_);
  for (int device = 0; device < kMaxDevices; ++device) {
    if (is_first) table_->capacity[device] = capacity_[device].load();
  }
  return true;
}

void DeviceUse::forget_slot(int slot) noexcept {
  for (auto& bytes : table_->used[slot]) bytes = 0;
  for (uint64_t index = 0; index < table_->row_count; ++index) table_->rows[index].holders &= ~bit_of(slot);
  table_->slots &= ~bit_of(slot);
}

void DeviceUse::forget_dead() noexcept {
  for (int slot = 0; slot < kSlots; ++slot) {
    const bool is_taken = (table_->slots & bit_of(slot)) != 0;
    if (slot != slot_ && is_taken && !is_locked_by_another(file_, byte_of_slot(slot))) forget_slot(slot);
  }
}

uint64_t DeviceUse::capacity(int device) const noexcept {
  return table_ != nullptr ? table_->capacity[device] : capacity_[device];
}

void DeviceUse::set_capacity(int device, uint64_t bytes) noexcept {
  capacity_[device] = bytes;
  if (table_ != nullptr) table_->capacity[device] = bytes;
}

uint64_t DeviceUse::counted(int device) noexcept {
  if (table_ == nullptr) return own_[device];
  forget_dead();
  uint64_t sum = 0;
  for (const auto& used : table_->used) sum += used[device];
  for (uint64_t index = 0; index < table_->row_count; ++index) {
    const auto& row = table_->rows[index];
    if (row.holders != 0 && row.device == static_cast<uint64_t>(device)) sum += row.bytes;
  }
  return sum;
}

uint64_t DeviceUse::total(int device) {
  const Turn turn(*this);
  end_late(false);
  return counted(device);
}

uint64_t DeviceUse::own(int device) noexcept {
  const Turn turn(*this);
  uint64_t bytes = own_[device];
  for (const Late& late : late_) bytes -= late.device == device ? late.bytes : 0;
  return bytes;
}

bool DeviceUse::take(int device, uint64_t bytes, uint64_t foreign, uint64_t key) {
  const Turn turn(*this);
  end_late(false);
  const uint64_t used = counted(device) + foreign;  // forgets the dead
  Table::Row* row = table_ != nullptr && key != 0 ? table_->find(key) : nullptr;
  const bool is_counted = row != nullptr;
  if (!is_counted && (used > capacity(device) || bytes > capacity(device) - used)) return false;
  if (table_ != nullptr && key == 0) {
    table_->used[slot_][device] += bytes;
  } else if (table_ != nullptr) {
    if (row == nullptr) row = table_->find_free();
    if (row == nullptr) return false;
    if (!is_counted) {
      row->key = key;
      row->bytes = bytes;
      row->device = static_cast<uint64_t>(device);
    }
    row->holders |= bit_of(slot_);
  }
  own_[device] += bytes;
  return true;
}

void DeviceUse::give_back(int device, uint64_t bytes, uint64_t key) noexcept {
  const Turn turn(*this);
  if (!has(Quirk::kLate)) return give_back_now(device, bytes, key);
  late_.push_back({std::chrono::steady_clock::now() + kLateness, device, bytes, key});
}

void DeviceUse::end_late(bool all) noexcept {
  const auto now = std::chrono::steady_clock::now();
  std::erase_if(late_, [&](const Late& late) {
    if (!all && late.end > now) return false;
    give_back_now(late.device, late.bytes, late.key);
    return true;
  });
}

void DeviceUse::give_back_now(int device, uint64_t bytes, uint64_t key) noexcept {
  own_[device] -= bytes;
  if (table_ == nullptr) return;
  Table::Row* const row = key != 0 ? table_->find(key) : nullptr;
  if (row != nullptr) row->holders &= ~bit_of(slot_);
  if (key == 0) table_->used[slot_][device] -= bytes;
}

}  // namespace ebbtide::sim
