// The pool that a thread allocates from: that of its own innermost region, else the newest one that was opened for all
// threads, else none (ordinary memory).
//
// Each thread has a stack of frames. A frame without a pool means ordinary memory (saver.disabled()). The thread-local
// part is one plain pointer, so it has no destructor that could run before the thread's last allocation. The frames of
// a thread that ends inside a region are leaked.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace ebbtide::cpu {

struct Pool;

// One thread's use of a pool, or of ordinary memory if `pool` is null.
struct Use {
  Pool* pool = nullptr;
  std::atomic<bool> is_over{false};
};

class Routing {
 public:
  // The pool that serves this thread now. Null means ordinary memory.
  Pool* current() const;

  // enter applies to this thread and returns the token of the frame. leave ends the newest use of that pool, and
  // restore ends the use with that token. Any thread may end a use, because a generator that is suspended in a region
  // may be collected in any thread. False if there is no such use.
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
