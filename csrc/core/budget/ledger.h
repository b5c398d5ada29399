#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "policy/host_room.h"

// How much host memory each process of a run holds: a small file with a slot for each (csrc/DESIGN.md, How a run shares
// a host limit). A slot belongs to the process that locks its first byte.
namespace ebbtide {

class Ledger {
 public:
  // Makes the file where there is none, and takes a slot. Throws StateError where it can't: a symbolic link, another
  // user's file, no ledger or another version's, all slots are taken, the system refuses.
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
  // If the program has closed the file, this process counts alone from then on, and has every turn.
  Turn take_turn() const;
  // In a turn: makes a truncated file whole. Memory of other processes counts again when they report it next.
  // Throws StateError where the system refuses.
  void mend() const;

  // The holdings of all other living processes. Read before the system's numbers, so that pages touched in between
  // count twice rather than never.
  policy::HostHoldings others() const noexcept;
  // Reports this process's memory. Does nothing in a file that is to be mended.
  void publish(const policy::HostHoldings& mine) const noexcept;

  static constexpr uint32_t kSlotCount = 256;
  static constexpr size_t kHeaderBytes = 64;  // there is room for more
  static constexpr size_t kSlotBytes = 32;
  static constexpr size_t kFileBytes = kHeaderBytes + kSlotBytes * kSlotCount;

 private:
  Ledger(int file, dev_t device, ino_t inode) : file_(file), device_(device), inode_(inode) {}
  bool is_open() const noexcept;
  void check_or_make_header(const std::string& path) const;
  void take_slot(const std::string& path);

  const int file_;  // of its own opening: only this object's locks hang on it
  const dev_t device_;
  const ino_t inode_;
  uint32_t own_slot_ = kSlotCount;
};

}  // namespace ebbtide
