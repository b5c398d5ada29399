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

namespace ebbtide::cpu {

struct Pool;

// A use of a pool, or of ordinary memory if `pool` is null.
struct Use {
  Pool* pool;
  bool is_for_all;  // threads that have no use of their own; else of one thread
  std::atomic<bool> is_over{false};

  Use(Pool* of, bool for_all) : pool(of), is_for_all(for_all) {}
};

class Routing {
 public:
  // The pool that serves this thread now. Null means ordinary memory.
  Pool* current() const;

  // enter applies to this thread, or to all, and returns the token of the use. leave ends the newest such use of that
  // pool, and restore ends the use with that token. Any thread may end a use, because a generator that is suspended in
  // a region may be collected in any thread. False if there is no such use.
  uint64_t enter(Pool* pool, bool is_for_all = false);
  bool leave(const Pool* pool, bool is_for_all = false);
  bool restore(uint64_t token);

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  std::atomic<Pool*> newest_for_all_{nullptr};
  template <typename Predicate>
  bool end(Predicate matches);

  std::mutex mutex_;
  uint64_t last_token_ = 0;
  std::map<uint64_t, std::shared_ptr<Use>> uses_;  // by token
};

}  // namespace ebbtide::cpu
