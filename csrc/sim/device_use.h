// How much memory of each device is in use: by this process, and with EBBTIDE_SIM_SHARED by all processes of this user
// that have the same name there, which then see one set of devices.
//
// - The shared table is a file in /dev/shm. Each process has a slot in it, which belongs to whoever locks its byte; the
//   system drops the lock when the process ends, however it ends. What a dead process held counts no more as soon as
//   another looks.
// - Memory that several processes can hold is a row with a bit for each holder. Every change takes effect with one
//   store, so a process may be killed at any instruction.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace ebbtide::sim {

constexpr int kMaxDevices = 64;

class DeviceUse {
 public:
  DeviceUse() = default;
  ~DeviceUse();
  DeviceUse(const DeviceUse&) = delete;
  DeviceUse& operator=(const DeviceUse&) = delete;

  // Forgets what this process used, and reads the environment again. False if the shared table can't be had.
  bool open();
  void reset() noexcept;

  // The same in all processes that share the devices, and in no others: the number of their table, or of this process.
  struct Owner {
    uint64_t number;
    bool is_shared;
  };
  Owner owner() const noexcept { return owner_; }
  uint64_t capacity(int device) const noexcept;
  void set_capacity(int device, uint64_t bytes) noexcept;
  // Of this process, without what is late, and of all.
  uint64_t own(int device) noexcept;
  uint64_t total(int device);

  // False if the memory is more than the device has left beside `foreign`. key: 0 for memory that only this process can
  // hold, or what names it among all processes. Such memory is counted once, and may be taken where another has it.
  bool take(int device, uint64_t bytes, uint64_t foreign, uint64_t key);
  void give_back(int device, uint64_t bytes, uint64_t key) noexcept;

 private:
  struct Table;
  class Turn;

  bool open_table(const std::string& path);
  bool take_slot();
  void forget_slot(int slot) noexcept;
  void forget_dead() noexcept;
  uint64_t counted(int device) noexcept;
  void give_back_now(int device, uint64_t bytes, uint64_t key) noexcept;
  void end_late(bool all) noexcept;
  void close_table() noexcept;

  std::mutex mutex_;  // threads of this process, which the file's locks do not keep apart
  std::array<std::atomic<uint64_t>, kMaxDevices> own_{};
  std::array<std::atomic<uint64_t>, kMaxDevices> capacity_{};
  // Was given back, and is in use until then (Quirk::kLate).
  struct Late {
    std::chrono::steady_clock::time_point end;
    int device;
    uint64_t bytes, key;
  };
  std::vector<Late> late_;
  Table* table_ = nullptr;
  int file_ = -1;
  int slot_ = -1;
  Owner owner_{0, false};
};

}  // namespace ebbtide::sim
