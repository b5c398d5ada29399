// The storages of tensors that autograd has saved, and where their bytes are: on the device, or on the host.
//
// - A storage is known once, however many tensors and graphs saved views of it. It is known as long as one of them
//   lives.
// - A storage can be evicted while nobody but this ledger refers to it: then no kernel and no caller can reach its
//   bytes except through bring_back().
// - Only memory of LMS's own tag leaves: while LMS is on, nobody can pause that, and torch frees it without the GIL. It
//   comes back to where LMS's memory is, whatever region the thread is in.
// - evict() is called from inside torch's allocator. So it allocates no device memory, waits for nobody while it has
//   the GIL, and no lock of ours is held where memory is given back to torch.
#pragma once

#include <c10/core/Storage.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace ebbtide::lms {

class Ledger;

// One storage. Its tensors share it; the last one to die forgets it.
class SavedStorage {
 public:
  SavedStorage(Ledger& ledger, c10::Storage storage, uint64_t number);
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;
  ~SavedStorage();

 private:
  friend class Ledger;
  enum class Place { kDevice, kLeaving, kHost, kReturning };

  Ledger& ledger_;
  const uint64_t size_bytes_;
  const c10::Device device_;
  // All below are guarded by the ledger's mutex.
  const void* address_;  // where its bytes were when it was saved, or when they came back
  Place place_ = Place::kDevice;
  c10::Storage storage_;     // kDevice
  void* on_host_ = nullptr;  // kHost
  uint64_t saved_;           // the order in which storages were saved: backward wants them in reverse
};

// What the module that serves CPU tensors offers. Plain functions, since it is another library.
struct Hooks {
  // Memory that belongs to LMS, or ordinary memory where LMS is off. Throws c10::OutOfMemoryError.
  void (*allocate)(size_t size_bytes, c10::DataPtr* data);
};

struct Statistics {
  uint64_t evictions = 0;
  uint64_t evicted_bytes = 0;
  uint64_t loaded_bytes = 0;
  uint64_t host_bytes = 0;    // of storages that are on the host now
  double waited_seconds = 0;  // spent in copies that a thread waited for
};

class Ledger {
 public:
  static Ledger& instance();  // leaked: graphs may be freed at any time

  // Throws std::bad_alloc.
  std::shared_ptr<SavedStorage> find_or_add(const c10::Storage& storage);
  // The storage, on the device. Throws what torch's allocator throws if it does not fit; nothing is lost then, and the
  // same call may work later. Waits for another thread that moves it: call it without the GIL.
  c10::Storage bring_back(SavedStorage& saved);
  // Evicts so that wanted_bytes become free, or all that can leave. Returns how many bytes left. Nothing leaves while
  // evictions are not allowed.
  uint64_t evict(uint64_t wanted_bytes) noexcept;
  // On return no eviction is under way. Call it without the GIL.
  void allow_evictions(bool are_allowed);
  void set_hooks(const Hooks& hooks) { hooks_ = hooks; }
  Statistics statistics() const;
  void reset_statistics();
  // Why the last eviction stopped: the host's answer, or "".
  std::string host_problem() const;

 private:
  friend class SavedStorage;
  Ledger();
  void forget(SavedStorage& saved) noexcept;
  bool move_out(std::unique_lock<std::mutex>& lock, const std::shared_ptr<SavedStorage>& saved) noexcept;
  bool can_leave(const SavedStorage& saved) const;
  void become_child() noexcept;
  uint64_t await_others(std::unique_lock<std::mutex>& lock);

  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<SavedStorage>> by_storage_;  // of those on the device
  std::map<uint64_t, std::weak_ptr<SavedStorage>> by_age_;                               // all, oldest first
  uint64_t last_number_ = 0;
  Hooks hooks_{};
  bool are_evictions_allowed_ = false;
  bool is_child_ = false;  // of a fork: the threads that moved something are not here
  int leaving_ = 0;
  uint64_t ever_evicted_bytes_ = 0;
  Statistics statistics_;
  std::string host_problem_;
};

}  // namespace ebbtide::lms
