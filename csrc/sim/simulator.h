// All state of the simulated driver behind one lock.
//
// - One mutex guards every table. Long work (copying bytes, host functions) runs without it, on physical blocks that a
//   shared_ptr holds. So an unmap in another thread can neither make the copy fault nor free its block.
// - The one instance is made at the first call and never destroyed, because other libraries call from static
//   destructors.
// - Handles that callers get (contexts, streams, events, graphs, allocations) are increasing numbers, never addresses.
//   So a stale handle is detected and never dereferenced.
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
  // Notified whenever work that ran without the lock has ended.
  std::condition_variable work_done;
  // The process that called cuInit; 0 before that.
  std::atomic<pid_t> owner{0};
  bool is_initialised = false;
  int driver_version = kDefaultDriverVersion;
  uint64_t last_id = 0;
  // The number of copies and host functions that run without the lock at the moment.
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

// Releases the lock for the duration of a piece of work.
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
