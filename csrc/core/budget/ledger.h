#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "policy/host_room.h"

// How much host memory each process of a run holds: a small file that all of them map, with a slot for each.
//
// A slot belongs to the process that locks its first byte. The lock is one of the open file, which the kernel drops
// when the process ends, in whatever way. So process numbers do not matter, the slot of a dead process counts as
// nothing, and it is reused.
namespace ebbtide {

class Ledger {
 public:
  // Makes the file where there is none, and takes a slot. Throws StateError where it can't: another version made the
  // file, all slots are taken, the system refuses.
  static std::unique_ptr<Ledger> open(const std::string& path);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  ~Ledger();

  // While it lives, no other process checks and charges. Waiting processes wait without a limit.
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
  // In a turn: makes a file whole that somebody has truncated. What others hold counts again when they tell it next.
  // Throws StateError where the system refuses.
  void mend() const;

  // The holdings of all other living processes. Read before the system's numbers, so that pages touched in between
  // count twice rather than never.
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
  bool is_whole() const noexcept;
  void make_whole(const std::string& path) const;
  void check_or_make_header(const std::string& path);
  void take_slot(const std::string& path);

  const int lock_file_;  // of its own opening: only this object's locks hang on it
  void* mapping_ = nullptr;
  uint32_t own_slot_ = kSlotCount;
};

}  // namespace ebbtide
