// All state of the simulated driver behind one lock.
//
// - One mutex guards every table. Long work (copying bytes, host functions) runs without it, on physical blocks held by
//   shared_ptr. So an unmap in another thread can neither fault the copy nor free the block under it.
// - The one instance is made at the first call and never destroyed, because other libraries call from static
//   destructors.
// - Handles given to callers (contexts, streams, events, graphs, allocations) are increasing numbers and never
//   addresses, so a stale one is detected and not followed.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "sim/address_space.h"
#include "sim/contexts.h"
#include "sim/host_memory.h"
#include "sim/lock.h"
#include "sim/modules.h"
#include "sim/peers.h"
#include "sim/physical.h"
#include "sim/streams.h"

namespace ebbtide::sim {

constexpr int kDefaultDriverVersion = 13000;

struct Simulator {
  std::mutex mutex;
  // Notified whenever something that ran without the lock has ended.
  std::condition_variable work_done;
  // Who called cuInit; 0 before that.
  std::atomic<pid_t> owner{0};
  bool is_initialised = false;
  int driver_version = kDefaultDriverVersion;
  uint64_t last_id = 0;
  // Copies and host functions that run without the lock just now.
  uint64_t unlocked_work = 0;

  PhysicalMemory physical;
  AddressSpace address_space;
  HostMemory host_memory;
  Contexts contexts;
  Peers peers;
  Modules modules;
  Streams streams;

  uint64_t next_id() { return 0x10000 + 16 * ++last_id; }
};

Simulator& simulator();

// Gives the lock back for the length of a piece of work.
class Unlocked {
 public:
  explicit Unlocked(Lock& lock) : lock_(lock) {
    ++simulator().unlocked_work;
    lock_.unlock();
  }
  ~Unlocked() {
    lock_.lock();
    --simulator().unlocked_work;
    simulator().work_done.notify_all();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  Lock& lock_;
};

template <typename Handle>
uint64_t id_of(Handle handle) {
  return reinterpret_cast<uint64_t>(handle);
}

template <typename Handle>
Handle handle_of(uint64_t id) {
  return reinterpret_cast<Handle>(id);
}

}  // namespace ebbtide::sim
