// The memory of optimizer states, which has a tag of its own, and when it moves between the device and the host.
//
// - States keep their addresses, and the device reaches them wherever they are. So they may be read at any time, except
//   while they move.
// - They move only where no other thread is in an optimizer's step; a step waits for a move that is under way. The
//   thread that moves them may be in a step itself: it uses no state while it allocates.
// - make_room() is called from inside torch's allocator. It holds no lock while the core moves memory, and waits for no
//   thread while it has the GIL.
// - While a region of the tag is open, the core refuses to move any of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <thread>

#include "torch/lms/move_gate.h"
#include "torch/lms/tag_memory.h"

namespace ebbtide::lms {

struct StateStatistics {
  uint64_t evicted_bytes = 0;
  uint64_t loaded_bytes = 0;
  uint64_t slow_reads = 0;        // steps that found states on the host
  uint64_t short_bytes = 0;       // of evicted_bytes: for an allocation outside steps
  uint64_t step_short_bytes = 0;  // of evicted_bytes: for an allocation inside a step
};

class OptimizerStates {
 public:
  static OptimizerStates& instance();  // leaked: an allocation may come at any time

  // Whether allocations may move states. On return of false no such move is under way. Call it without the GIL.
  void allow_moves(bool are_allowed);

  // Brackets a step of an optimizer in a thread. Steps may be nested. begin_step() waits for a move that is under way:
  // call it without the GIL. Throws std::runtime_error if an earlier move left states without memory that is mapped,
  // and that can't be mended.
  void begin_step();
  void end_step(std::thread::id thread) noexcept;
  bool is_in_step();

  // Moves states to the host until so many bytes of the device are free, or nothing more can leave. Returns how many
  // bytes left; 0 where a move is not allowed now.
  uint64_t make_room(uint64_t wanted_bytes) noexcept;
  // At most so many bytes leave or come back, if that is allowed now. What does not fit stays where it is. Call them
  // without the GIL.
  uint64_t send_away(uint64_t most_bytes) noexcept;
  uint64_t bring_back(uint64_t most_bytes) noexcept;
  // Of the tag, all of it, and what is on the host now.
  static uint64_t total_bytes();
  static uint64_t host_bytes();

  void count_slow_read();
  StateStatistics statistics();
  void reset_statistics();
  // Why states could not leave when that was last tried, or "".
  std::string problem();

 private:
  using Lock = MoveGate::Lock;

  OptimizerStates();
  MoveGate::Turn take_turn();
  Moved demote(uint64_t most_bytes) noexcept;

  MoveGate gate_;                         // guards what follows
  std::map<std::thread::id, int> steps_;  // of each thread that is in one, how many
  StateStatistics statistics_;
};

}  // namespace ebbtide::lms
