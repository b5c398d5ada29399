// The storages of tensors that autograd has saved, and where their bytes are: on the device, on the host, or on the
// way between them.
//
// - A storage is known once, however many tensors and graphs saved views of it. It is known as long as one of them
//   lives.
// - A storage can leave while nobody but this ledger refers to it: then no caller can reach its bytes except through
//   bring_back(), and every kernel that uses them was queued before.
// - Its way out is a copy to the host, which may begin long before the device memory is wanted, and the release of that
//   memory, which comes after the copy in the order of the device's work. Its way back is an allocation and a copy.
// - Only memory of LMS's own tag leaves: while LMS is on, nobody can pause that, and torch frees it without the GIL. It
//   comes back to where LMS's memory is, whatever region the thread is in.
// - Training repeats itself. What one step saved and wanted, and when, is the plan for the next: what has to leave is
//   copied and released before memory is short, and comes back before it is wanted. Where no plan fits, or a step
//   deviates from it, storages leave on demand, and come back when they are wanted.
// - reclaim() is called from inside torch's allocator. So it allocates no device memory, waits for no thread while it
//   has the GIL, and no lock of ours is held where memory is given back to torch.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "policy/lms/eviction.h"
#include "policy/lms/rest.h"
#include "policy/lms/step_follower.h"
#include "torch/lms/device_side.h"
#include "torch/lms/transfer.h"

namespace ebbtide::lms {

class Ledger;

// One storage. Its tensors share it; the last one to die forgets it.
class SavedStorage : public std::enable_shared_from_this<SavedStorage> {
 public:
  SavedStorage(Ledger& ledger, c10::Storage storage, c10::Stream stream, uint64_t number);
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;
  ~SavedStorage();

 private:
  friend class Ledger;
  // kMoving: a thread sends it away or back, and the others wait.
  enum class Place { kDevice, kHost, kMoving };

  Ledger& ledger_;
  const uint64_t size_bytes_;
  const c10::Device device_;
  const c10::Stream stream_;  // in which it was saved: what wrote it, and what read it last, is queued there
  // All below are guarded by the ledger's mutex.
  const void* address_;  // where its bytes were when it was saved, or when they came back
  Place place_ = Place::kDevice;
  c10::Storage storage_;  // kDevice
  // kHost: its bytes. kDevice: those of a departure that was begun, or of an arrival that nobody has waited for yet.
  Transit transit_;
  uint64_t saved_;                // the order in which storages were saved: backward wants them in reverse
  uint64_t number_ = UINT64_MAX;  // in its device's steps
  bool stays_ = false;            // it leaves only where an allocation would fail otherwise
};

struct Statistics {
  uint64_t evictions = 0;
  uint64_t reclaims = 0;  // allocations that did not fit
  uint64_t evicted_bytes = 0;
  uint64_t loaded_bytes = 0;
  uint64_t host_bytes = 0;           // of storages that are on the host now
  double waited_seconds = 0;         // spent in copies that a thread waited for
  double stream_waited_seconds = 0;  // that a stream had nothing to do but to wait for a copy
  double hidden_seconds = 0;         // of copies beside other work
  uint64_t prefetch_hits = 0;        // loads ahead of need that were complete when their tensor was wanted
  uint64_t prefetch_late = 0;        // those that were not
  uint64_t plans_made = 0;           // of steps, ever
  uint64_t margin_bytes = 0;         // what plans leave free of the limit
};

class Ledger {
 public:
  static Ledger& instance();  // leaked: graphs may be freed at any time

  // Throws std::bad_alloc.
  std::shared_ptr<SavedStorage> save(const c10::Storage& storage);
  // The storage, on the device, for work of the calling thread. Throws what torch's allocator throws if it does not
  // fit, and std::runtime_error if the driver fails; nothing is lost then, and the same call may work later. Waits for
  // another thread that moves it: call it without the GIL.
  c10::Storage bring_back(SavedStorage& saved);
  // Sends storages away so that wanted_bytes become free, or all that can leave. Returns how many bytes left. Nothing
  // leaves while evictions are not allowed.
  uint64_t evict(uint64_t wanted_bytes, std::optional<c10::Device> only_from = {}) noexcept;
  // The same for torch's allocator, where an allocation of so many bytes does not fit: the next plan knows of it.
  // is_first: nothing has left for this allocation yet, so that what is short may suffice.
  uint64_t reclaim(c10::Device device, uint64_t wanted_bytes, bool is_first) noexcept;
  // The program has allocated so many bytes: what it needs between two events is part of the demand.
  void note_taken(c10::Device device, uint64_t size_bytes) noexcept;
  // Whether the plan's limit has room for an allocation ahead of need.
  bool has_room_ahead(c10::Device device, uint64_t wanted_bytes) noexcept;
  // A module is called by this thread: open_calls().back().
  enum Told : uint32_t {
    kToldNothing = 0,
    kRecompute = 1,  // the step's plan recomputes the call
    kNewChoice = 2,  // a step begins with it, and its choice is new
    kGiveBack = 4,   // a step begins with it, before which torch's cache is to be given back
  };
  uint32_t enter_call();
  void leave_call() noexcept;
  // Of a module: whether it can't be recomputed, after all.
  void forbid_recomputation(uint64_t module, bool is_forbidden);
  // may_evict: plans may; if not, nothing leaves but where an allocation would fail otherwise. may_rest: steps may go
  // on unfollowed once a few have fitted. are_new: plans were made under other rules, and are forgotten. Calls of
  // modules that a filter concerns have to be known. forced: from the next step on, all steps have this choice. Null:
  // the fastest one.
  void set_rules(bool may_recompute, bool may_evict, bool may_rest, bool are_new,
                 std::shared_ptr<const policy::ForcedChoice> forced);
  // Whether steps wait for those of other processes, whose choices may be others.
  void set_ranks(bool has_ranks);
  bool is_resting() const { return rest_.is_on(); }
  // What plans take for the speed of the bus, both ways; 0: what copies show.
  void assume_rate(double bytes_per_second);
  // Chooses anew for the step that has just begun, without modules that were forbidden since.
  void choose_again();
  // This step does more than others like it: its time counts for nothing.
  void disturb_step();
  // A step of an optimizer begins.
  void note_update();
  // Of optimizer states, what plans have on the host; none without a plan.
  std::optional<uint64_t> planned_state_bytes();
  void forget_planned_states();
  // The modules that the latest step's choice recomputes.
  struct BlockReport {
    uint64_t module;
    uint64_t name;  // of the call
    uint64_t bytes;
    double seconds;
  };
  std::vector<BlockReport> recomputed_blocks();
  // Modules that choices for the latest step may recompute.
  std::vector<uint64_t> candidates();
  // The step that ended last, on the device that saw the most, and of its plan's limit what takes no device memory.
  std::optional<std::pair<policy::KnownStep, uint64_t>> latest_step();
  // Whether this thread allocates ahead of need.
  static bool is_prefetching() { return is_prefetching_; }
  // On return of a call that ends them, no eviction and no planned action is under way, and copies to the host that
  // nobody needs any more are complete and have given their memory back. Call it without the GIL.
  void allow_evictions(bool are_allowed);
  Statistics statistics();
  void reset_statistics();
  // Why the last eviction stopped: the host's answer, or "".
  std::string problem() const;

 private:
  friend class SavedStorage;
  using Lock = std::unique_lock<std::mutex>;

  // The training steps on one device. A step ends when everything that it saved is gone, and some of it was wanted.
  struct Steps {
    policy::StepFollower follower;
    policy::StepActions due;
    std::vector<uint64_t> postponed;                       // loads for which there was no room yet, in the order of use
    std::unordered_map<uint64_t, SavedStorage*> storages;  // of this step, by number; those that live
    std::map<uint64_t, int> watched;                       // those that may have become free, and for how many looks
    std::unordered_map<uint64_t, uint64_t> calls;          // of each module in this step
    std::vector<std::pair<uint32_t, TimeMark>> marks;      // of its events
    uint64_t least_limit_bytes = UINT64_MAX;               // when memory was short
    uint64_t evicted_before_bytes = 0;                     // ever, before it
    uint64_t flushes = 0;                                  // ever, that were noted
    bool was_wanted = false;
    bool was_disturbed = false;
    bool was_short = false;
    bool has_flushed = false;
    bool is_choice_new = false;    // and no call was told of it
    uint64_t elsewhere_bytes = 0;  // of the latest plan: what of the demand took no device memory, without states
    uint64_t state_bytes = 0;      // of the latest plan: of optimizer states, wherever they lie
  };
  // What copies in one direction have done so far.
  struct Rate {
    double bytes = 0, seconds = 0;
    double bytes_per_second() const;
    void add(const Rate& other);
  };

  enum class Candidates { kMeant, kCopied, kAll };  // without those that the program wants to stay
  struct Choice {
    std::vector<std::shared_ptr<SavedStorage>> storages;  // outlive the lock: the last reference may be among them
    std::vector<policy::Evictable> numbers;               // size 0: can't leave
  };
  struct Attempt {
    uint64_t freed_bytes = 0;
    bool has_failed = false;          // to send one away
    bool have_others_begun = false;   // what other threads begin to copy, or send away, could not be looked at
    uint64_t ever_evicted_bytes = 0;  // at its end
  };

  Ledger();
  void become_child() noexcept;
  void forget(SavedStorage& saved) noexcept;
  void look_for(Candidates which, std::optional<c10::Device> only_from, Choice& found) const;
  Attempt evict_among(Candidates which, uint64_t wanted_bytes, std::optional<c10::Device> only_from);
  uint64_t await_others(const Attempt& attempt);

  // ledger_moves.cpp
  bool can_leave(const SavedStorage& saved) const;
  bool send_away(Lock& lock, SavedStorage& saved) noexcept;
  void receive(Lock& lock, SavedStorage& saved, c10::Stream stream);
  void load(Lock& lock, SavedStorage& saved, c10::Stream stream, bool is_ahead);
  void begin_departure(Lock& lock, SavedStorage& saved) noexcept;
  bool begin_arrival(Lock& lock, SavedStorage& saved) noexcept;
  void retire(Transit& transit) noexcept;
  void reap(bool waits_for_all = false) noexcept;

  // ledger_steps.cpp
  uint64_t demand_bytes(uint64_t used_bytes) const { return used_bytes + statistics_.host_bytes; }
  double now() const;
  void await_marks(c10::Device device);
  static bool has_ended(const Steps& steps);
  // After the end of the last step, if that is due.
  Steps& steps_now(c10::Device device, const DeviceSide::Usage& usage);
  void end_step(c10::Device device, Steps& steps, const DeviceSide::Usage& usage);
  bool did_fit(const Steps& steps) const;
  void begin_anew(Steps& steps) const;
  void forget_rest();
  void end_rest_if_over();  // where nothing is saved: the next step is followed from its first call
  void note_elsewhere(c10::Device device, Steps& steps) const;
  bool send_planned_states();
  static void set_times(Steps& steps);
  void load_ahead(Steps& steps, const SavedStorage& saved);
  static uint64_t limit_now(c10::Device device, const Steps& steps);
  policy::StepRules rules_for(c10::Device device, const Steps& steps) const;
  static void note_due(Steps& steps);
  static void watch(Steps& steps, SavedStorage& saved);
  static void note_free(Steps& steps);
  void note_flushes(c10::Device device, Steps& steps, const DeviceSide::Usage& usage);
  void want(SavedStorage& saved, const DeviceSide::Usage& usage);
  void forget_in_step(SavedStorage& saved) noexcept;
  void perform(c10::Device device) noexcept;

  // ledger_calls.cpp
  void note_saved(SavedStorage& saved, bool is_new, const DeviceSide::Usage& usage);
  policy::NewStorage name_storage(const c10::Storage& storage, Steps& steps, uint64_t used_bytes);
  void renew_frames(c10::Device device, Steps& steps, uint64_t used_bytes);
  void mark(c10::Device device, Steps& steps);

  static thread_local bool is_prefetching_;  // in this thread an allocation is made ahead of need
  mutable std::mutex mutex_;
  std::condition_variable moved_;
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<SavedStorage>> by_storage_;  // of those on the device
  std::map<uint64_t, std::weak_ptr<SavedStorage>> by_age_;                               // all, oldest first
  std::map<c10::DeviceIndex, Steps> steps_;
  Rate out_, in_;
  uint64_t steps_since_update_ = 0, steps_per_update_ = 1;  // updates by optimizers
  bool has_optimizers_ = false;
  std::unordered_set<uint64_t> forbidden_;  // modules that can't be recomputed
  bool may_recompute_ = false, may_evict_ = true;
  std::shared_ptr<const policy::ForcedChoice> forced_;
  policy::Rest rest_;
  bool may_rest_ = true;
  bool has_ranks_ = false;
  double assumed_rate_ = 0;
  std::vector<Transit> retired_;  // whose copies may still be under way, and whose bytes nobody wants
  uint64_t last_number_ = 0;
  bool are_evictions_allowed_ = false;
  bool is_child_ = false;  // of a fork: the threads that moved something are not here
  int leaving_ = 0;        // departures that threads begin or complete now
  int arriving_ = 0;       // loads ahead of need, likewise
  uint64_t ever_evicted_bytes_ = 0;
  Statistics statistics_;
  std::string problem_;
};

}  // namespace ebbtide::lms
