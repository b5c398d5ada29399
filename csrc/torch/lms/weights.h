// The memory of weights and of their gradients, which have tags of their own, and when it moves between the device and
// the host. What is said of weights holds for gradients, too; only that nobody announces their uses, so that they leave
// first.
//
// - Weights keep their addresses, and the device reaches them wherever they are. So whoever reads or writes them gets
//   the right bytes at any time, except while they move.
// - They move by allocations of their tags (units), each of which may hold several weights.
// - A thread uses weights from begin_use() to end_use(), and in backward from the first one that it unpacks to the end
//   of the backward. Weights move only while no other thread uses any. The thread that moves them may use them itself:
//   it does not read them while it allocates, and on a GPU the core waits for the device. So nothing moves inside a
//   parallel region of the processor, whose other threads read meanwhile.
// - What is used next comes first: who leaves is the unit whose next use is farthest, as far as earlier uses tell.
// - make_room() is called from inside torch's allocator. It holds no lock while the core moves memory, and waits for no
//   thread while it has the GIL.
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "policy/lms/use_order.h"
#include "torch/lms/move_gate.h"
#include "torch/lms/tag_memory.h"

namespace ebbtide::lms {

struct WeightStatistics {
  uint64_t evicted_bytes = 0;
  uint64_t loaded_bytes = 0;
  uint64_t slow_reads = 0;  // uses that found weights on the host
};

enum class UseKind : uint8_t {
  kModule,  // by a module, for its call
  kStep,    // by an optimizer, for its step
  kWrite,   // of gradients, as they are accumulated
};

class Weights {
 public:
  static Weights& instance();  // leaked: an allocation may come at any time

  // Whether weights may move. On return of false no such move is under way. Call it without the GIL.
  void allow_moves(bool are_allowed);

  // Brackets a use of the weights at these addresses in a thread, and brings them to the device if it can. Uses may be
  // nested. begin_use() waits for a move that is under way: call it without the GIL. Throws std::runtime_error if an
  // earlier move left weights without memory that is mapped, and that can't be mended.
  // user: what uses them, to tell nested uses apart; end_use() also ends uses inside it that nobody has ended.
  // brings: false: what lies on the host stays there.
  void begin_use(const void* user, UseKind kind, const std::vector<const void*>& addresses, bool brings = true);
  void end_use(const void* user, std::thread::id thread) noexcept;
  // How many uses by modules are open in this thread.
  size_t module_depth() const;
  // Whether a use by a module that begins now counts. As long as no weight has had to leave, the outermost one is
  // enough: it keeps other threads from moving any. At the first shortage it is not known then which are used last.
  bool is_use_followed() const { return have_left_.load() || module_depth() == 0; }
  // Backward is about to read a weight. The rest is as in begin_use().
  void use_in_backward(const void* address);
  // Whether some of the memory that holds the weight at this address is on the host.
  static bool is_on_host(const void* address);
  // Whether it is memory of theirs.
  bool is_weight(const c10::Storage& storage) const;

  // Moves weights to the host until so many bytes of the device are free, or nothing more can leave. Returns how many
  // bytes left; 0 where a move is not allowed now.
  uint64_t make_room(int device, uint64_t wanted_bytes) noexcept;
  // At most so many bytes come back into room that is there, if that is allowed now. Call it without the GIL.
  // with_gradients: false: those stay.
  uint64_t bring_back(uint64_t most_bytes, bool with_gradients = true) noexcept;
  // The gradient at this address leaves, if that is allowed now. Call it without the GIL.
  uint64_t send_gradient_away(const void* address) noexcept;
  static uint64_t host_bytes();
  // Without gradients.
  static uint64_t weights_host_bytes();
  // Whether room was wanted that only weights and gradients could make, since this was forgotten.
  bool is_short() const { return is_short_.load(); }
  void forget_shortage();
  // Another one after each change of the limit.
  uint64_t limits() const { return limits_.load(); }

  WeightStatistics statistics();
  void reset_statistics();
  // Why weights could not leave when that was last tried, or "".
  std::string problem();

 private:
  using Lock = MoveGate::Lock;
  using Units = std::vector<ebbtide_allocation_info>;
  struct Use {
    const void* user;
    UseKind kind;
    std::vector<uint64_t> units;
  };

  Weights();
  struct ThreadEnd;
  class Backward;
  void watch_thread();
  bool has_other_users() const;
  MoveGate::Turn take_turn();
  void note_used(const Units& units);
  void bring(const Units& units);
  uint64_t send_away(int device, uint64_t wanted_bytes, const Units* spared);
  void note(const Moved& moved, uint64_t& counter) noexcept;

  mutable MoveGate gate_;                                  // guards what follows
  std::map<std::thread::id, std::vector<Use>> uses_;       // by thread, the outermost first
  std::set<std::pair<std::thread::id, int>> in_backward_;  // with torch's graph task: those of a GPU share its thread
  policy::UseOrder order_;
  std::atomic<bool> is_short_{false};
  std::atomic<uint64_t> limits_{1};
  std::atomic<bool> have_left_{false};  // some have left, or were to leave, since a shortage was forgotten
  bool expects_backward_ = false;
  WeightStatistics statistics_;
};

}  // namespace ebbtide::lms
