#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "driver/driver.h"
#include "store/staging.h"
#include "store/store.h"

// The way of bytes between device memory and a store: device <-> pinned slot <-> store, in pieces of a slot, by several threads with a stream each.
namespace ebbtide {

// One chunk's bytes.
struct CopyJob {
  CUdeviceptr device_address = 0;
  Backup* backup = nullptr;
  size_t offset = 0;  // in the backup
  size_t size_bytes = 0;
};

enum class CopyDirection { kToStore, kToDevice };

// Everything that a copy needs (streams, events) is made by the constructor, so that run() fails only for what happens to the bytes. Used once at a time.
class Copier {
 public:
  // staging has at least one slot a thread (two, so that bus and memory work at once) and outlives the copier.
  Copier(int device, Staging& staging, int thread_count);
  ~Copier();
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  // Calls landed(i) in the calling thread once all bytes of jobs[i] are where they belong (for kToDevice: visible to every later kernel), in any order. Throws the first error
  // (DriverError, StoreError, or what landed threw) after all threads have stopped and nothing is queued any more: the jobs that were not announced are then as they were at their source.
  void run(CopyDirection direction, std::span<const CopyJob> jobs, const std::function<void(size_t)>& landed);

  // False where a failed copy could not be waited for: the device may still read or write the chunks and the staging.
  bool is_quiet() const { return !staging_.is_poisoned(); }

 private:
  class Worker;
  class Shared;
  void run_threads(Shared& shared);

  int device_;
  Staging& staging_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace ebbtide
