#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "policy/host_room.h"

// Who holds how much host memory, among the processes of one run: a small file that all of them map, with a slot for each.
//
// A slot belongs to the process that holds the lock on its first byte, a lock of the open file: the kernel drops it when the process ends, however that happens. So no process number is
// ever looked at, what a dead process held counts as nothing, and its slot is taken again.
namespace ebbtide {

class Ledger {
 public:
  // Makes the file where there is none, and takes a slot. Throws StateError where it can't: another version made the file, all slots are taken, the system refuses.
  static std::unique_ptr<Ledger> open(const std::string& path);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  ~Ledger();

  // While it lives no other process looks and charges. Processes that wait for theirs wait without a limit.
  class Turn {
   public:
    explicit Turn(int file) : file_(file) {}
    Turn(Turn&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
    Turn& operator=(Turn&&) = delete;
    ~Turn();

   private:
    int file_;
  };
  Turn take_turn() const;

  // What all other living processes hold together. Before it is compared with the system's numbers, so that what is touched in between counts twice and not never.
  policy::HostHoldings others() const;
  // What this process holds.
  void publish(const policy::HostHoldings& mine) noexcept;

  static constexpr uint32_t kSlotCount = 256;

 private:
  struct Header;
  struct Slot;
  explicit Ledger(int lock_file) : lock_file_(lock_file) {}
  Header& header() const;
  Slot& slot(uint32_t index) const;
  void map(const std::string& path);
  void check_or_make_header(const std::string& path);
  void take_slot(const std::string& path);

  const int lock_file_;  // of its own opening: only this object's locks hang on it
  void* mapping_ = nullptr;
  uint32_t own_slot_ = kSlotCount;
};

}  // namespace ebbtide
