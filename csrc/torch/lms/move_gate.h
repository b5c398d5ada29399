// Who may move the memory of some tags, and who waits meanwhile.
//
// - What uses the memory announces itself to the gate's owner, which keeps count of uses under the gate's lock. A move
//   begins only where the owner finds no other thread's use, and a use waits for a move that is under way.
// - Uses that wait come before the next move: threads that move again and again do not starve them.
// - After a move that failed and could not be mended none begins, until a use has mended the memory.
// - A forked child, which has no other thread, finds the lock free, no move under way, and moves forbidden.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <string>

#include "torch/lms/tag_memory.h"

namespace ebbtide::lms {

class MoveGate {
 public:
  using Lock = std::unique_lock<std::mutex>;
  class Turn;

  // what: what the memory holds, for messages. The gate and both arguments live for ever.
  MoveGate(const TagMemory& memory, const char* what);
  MoveGate(const MoveGate&) = delete;
  MoveGate& operator=(const MoveGate&) = delete;

  Lock lock() { return Lock(mutex_); }

  // Whether moves may begin. On return of false none is under way, and what a failed one left unmapped is mended. Call
  // it without the GIL. Throws as wait_for_move() does.
  void allow(Lock& lock, bool are_allowed);
  // Before a use begins, and before it reads what it brought: no move is under way then. Call it without the GIL.
  // Throws std::runtime_error if an earlier move left memory that is not mapped, and that can't be mended.
  void wait_for_move(Lock& lock);

  // What came of a move.
  void note(const Lock& lock, const Moved& moved) noexcept;
  void forget_problem(const Lock& /*lock*/) { problem_.clear(); }
  // Why the last move failed, or "".
  std::string problem();

 private:
  void mend(Lock& lock);
  bool may_begin() const { return are_moves_allowed_ && !is_moving_ && !is_broken_ && waiting_ == 0; }
  static void before_fork();
  static void after_fork();
  static void after_fork_in_child();

  const TagMemory& memory_;
  const char* const what_;
  MoveGate* next_ = nullptr;  // of all gates, for forks
  std::mutex mutex_;
  std::condition_variable moved_;
  bool are_moves_allowed_ = false;
  bool is_moving_ = false;
  bool is_broken_ = false;  // a move failed, and some of the memory may not be mapped
  size_t waiting_ = 0;      // uses that wait for the end of a move
  std::string problem_;
};

// The right to move, if this thread gets it.
class MoveGate::Turn {
 public:
  // is_free: asked under the lock; whether no other thread uses the memory.
  template <typename Question>
  Turn(MoveGate& gate, const Question& is_free) : gate_(gate) {
    const Lock lock(gate_.mutex_);
    is_taken_ = gate_.may_begin() && is_free();
    if (is_taken_) gate_.is_moving_ = true;
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (!is_taken_) return;
    {
      const Lock lock(gate_.mutex_);
      gate_.is_moving_ = false;
    }
    gate_.moved_.notify_all();
  }
  explicit operator bool() const { return is_taken_; }

 private:
  MoveGate& gate_;
  bool is_taken_ = false;
};

}  // namespace ebbtide::lms
