// Which pool a thread allocates from: the innermost region of its own, else the newest one that was opened for
// every thread, else none (ordinary memory).
//
// Each thread has a stack of frames; a frame without a pool means ordinary memory (saver.disabled()). The thread's
// part is one plain pointer, so it has no destructor that could run before the thread's last allocation; the frames
// of a thread that ends inside a region are leaked.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace ebbtide::cpu {

struct Pool;

// Of a pool, or (null) of ordinary memory, by one thread.
struct Use {
  Pool* pool = nullptr;
  std::atomic<bool> is_over{false};
};

class Routing {
 public:
  // The pool that serves this thread now; null for ordinary memory.
  Pool* current() const;

  // For this thread. enter gives the frame's token; leave ends the newest use of that pool, restore that of the token.
  // Any thread may end it: a generator that waits in a region may be collected anywhere. False where there is none.
  uint64_t enter(Pool* pool);
  bool leave(const Pool* pool);
  bool restore(uint64_t token);

  void enter_all(Pool* pool);
  bool leave_all(const Pool* pool);

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::atomic<Pool*> newest_for_all_{nullptr};
  template <typename Predicate>
  bool end(Predicate matches);

  std::mutex mutex_;
  uint64_t last_token_ = 0;
  std::map<uint64_t, std::shared_ptr<Use>> uses_;  // by token
  std::vector<Pool*> for_all_;
};

}  // namespace ebbtide::cpu
