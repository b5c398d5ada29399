#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "base/tag.h"
#include "core/memory/allocation.h"
#include "core/registry/ahead_steps.h"
#include "core/registry/handler_safe_mutex.h"
#include "core/registry/leases.h"
#include "core/registry/paused_set.h"
#include "core/registry/tag.h"

// All allocations, by address and by tag, and the operations that hold them. There is one mutex, which Leases shares,
// held for look-ups only: no driver call, copy or wait for an operation happens under it, except that claim() waits on
// a condition, which releases it. Invariant 12 rests on this.
namespace ebbtide {

struct TagRequest {
  std::vector<std::string> names;  // empty: every tag
  std::vector<CUdeviceptr>
      addresses;  // not empty: only the allocations that begin here; a resume takes trimmed ones only so
  bool is_missing_ok = false;
  std::shared_ptr<const PausedSet> only;  // not null: only these, and of them no trimmed ones
};

// The tags and allocations that an operation holds. No other operation can hold the same tags at the same time.
struct TagClaim {
  TagRequest tags;
  // Selects among the allocations of the tags. Called under the registry's lock.
  std::function<bool(const Allocation&)> concerns;
  // Select among all allocations of the tags, even where the request names addresses.
  bool is_among_all = false;
  bool may_wait = true;         // for operations that hold the tags; else a BusyError
  bool asks_borrowers = false;  // before it takes memory away that other processes use

  // torch may hand memory of a leased tag to a thread at any moment. A claim that takes memory away is therefore
  // refused while a lease is open. It also retires the pools that were leased before (Tag::epoch).
  enum class Leases { kAllowed, kRefused, kRefusedWhereMemoryIs };
  Leases leases = Leases::kAllowed;
  bool moves_memory = true;  // the tags count as moving while they are held
  bool is_ahead_step = false;

  // How the tags are left.
  bool finishes_tags = false;      // once everything has moved, no tag is partial
  bool counts_as_pause = false;    // for Tag::pause_count
  bool marks_trimmed = false;      // allocations that are away in the end return only when named by address
  bool takes_stale_memory = true;  // memory behind chunks that are away counts as unfinished
};

// The tags and allocations that an operation holds.
struct Selection {
  std::vector<Tag*> tags;
  // The result of one claim.
  struct Group {
    TagClaim claim;
    std::vector<Tag*> tags;
    std::vector<std::shared_ptr<Allocation>> allocations;
    std::vector<Tag*> losing_tags;  // without a lease, so that memory of them may leave
  };
  std::vector<Group> groups;                        // as they were claimed
  uint64_t last_lease = 0;                          // the newest one that was ever opened on any of the tags
  std::vector<std::shared_ptr<Allocation>> doomed;  // room for those that are freed meanwhile
  bool has_left_any = false;                        // there were tags that others held
  uint64_t ahead_step = 0;                          // its number, where it is one
};

// How an operation ended: nothing given up, all done, or failed in between.
enum class Outcome { kUntouched, kWhole, kMidway };

// A tag lives as long as the registry.
struct HeldBytes {
  const Tag* tag;
  int device;
  uint64_t bytes;
};

class Registry {
 public:
  // Makes the tag known. Throws InvalidArgument for a malformed name.
  Tag& tag(const std::string& name);

  void insert(std::shared_ptr<Allocation> allocation);
  uint64_t next_sequence() { return ++sequence_; }

  // Removes the allocation that begins at address, for its free. Null with *is_ours false: not ours. Null with *is_ours
  // true: an operation holds it and will free it.
  std::shared_ptr<Allocation> take(CUdeviceptr address, bool* is_ours);

  // The allocation that contains address and was not freed; null if none.
  std::shared_ptr<Allocation> find(CUdeviceptr address) const;
  // Whether any byte of the range lies in an allocation and is not resident. No bytes count as one.
  bool is_away(CUdeviceptr address, size_t size_bytes) const;
  // The same, without allocations that a resume in the background is bringing.
  bool is_missing(CUdeviceptr address, size_t size_bytes) const;
  bool is_any_away(const Tag& tag) const;  // also while an operation moves it
  // For signal handlers: gives up where any thread, also the interrupted one, has the lock. Copies the tag's name.
  bool find_in_handler(CUdeviceptr address, char* tag, size_t capacity, bool* is_away) const noexcept;
  // `stored` or `verdicts` of an allocation, under the lock. Only its holder replaces them. The earlier object goes
  // after the lock.
  template <typename T>
  void replace(std::shared_ptr<T>& pointer, std::type_identity_t<std::shared_ptr<T>> next) noexcept {
    const std::lock_guard lock(mutex_);
    pointer.swap(next);
  }
  template <typename T>
  std::shared_ptr<T> read(const std::shared_ptr<T>& pointer) const {
    const std::lock_guard lock(mutex_);
    return pointer;
  }

  // Adds 1 or -1 to one of the three counts of an allocation; -1 does nothing at 0.
  void add_to(Allocation& allocation, int Allocation::* number, int change);

  // Holds the tags, and those of their allocations that are claimed, all in one step, so that two operations never wait
  // for each other. Waits while another operation holds one of the tags. Throws StateError for an unknown tag, and for
  // a leased one, or exported memory, where a claim refuses that.
  Selection claim(std::vector<TagClaim> claims);
  // Visits the allocations that claim() would hold now, by claim, and holds nothing. Waits and throws as it does. visit
  // is called under the lock, and must not keep an allocation, which would put off its free.
  void preview(std::vector<TagClaim> claims, const std::function<void(size_t claim, const Allocation&)>& visit);
  // Waits until no operation holds any of these tags.
  void wait_for(const TagRequest& tags);
  // Holds those allocations that concerns() says, of the tags that no operation holds. Never waits, whatever is leased.
  // concerns is called under the lock.
  Selection claim_idle(const std::function<bool(const Allocation&)>& concerns);
  // Lets go of the tags. Returns the allocations that were freed meanwhile, which the caller destroys outside every
  // lock.
  std::vector<std::shared_ptr<Allocation>> release(Selection& selection, Outcome outcome) noexcept;

  // visit must not call back into the registry.
  void visit_tags(const std::function<void(const Tag&)>& visit) const;
  // Only the tag of this name; false if there is none, or a StateError if there must be.
  bool visit_tag(const std::string& name, const std::function<void(const Tag&)>& visit, bool is_required = false) const;
  // Device bytes now: a row for each tag and device that ever had any, in order of first use.
  std::vector<HeldBytes> held() const;
  // How many tags and allocations all calls so far have looked at, except look-ups by name or address. Tests bound its
  // growth.
  uint64_t look_count() const { return look_count_.load(); }

  Leases leases{mutex_};
  AheadSteps ahead_steps;

 private:
  std::vector<Tag*> resolve(const TagRequest& request) const;
  std::vector<Tag*> resolve_all(const std::vector<TagClaim>& claims) const;
  std::vector<Tag*> wait_until_free(std::unique_lock<HandlerSafeMutex>& lock, const std::vector<TagClaim>& claims);
  void select(Selection::Group& group) const;
  Selection choose(std::unique_lock<HandlerSafeMutex>& lock, std::vector<TagClaim> claims);
  void hold(Selection& selection, bool moves_memory);
  void add_held_row(Tag& tag, int device);
  void count(Allocation& allocation, const Amounts& now) noexcept;
  void look(size_t count) const noexcept { look_count_.fetch_add(count, std::memory_order_relaxed); }
  [[noreturn]] void throw_unknown(const std::string& name, const char* advice) const;
  const std::shared_ptr<Allocation>* find_locked(CUdeviceptr address) const noexcept;
  bool is_any_byte_away(CUdeviceptr address, size_t size_bytes, bool counts_arriving) const;
  void erase_locked(const std::shared_ptr<Allocation>& allocation);
  static void end_if_on_one_side(Tag& tag) noexcept;  // then nothing is left to finish

  mutable HandlerSafeMutex mutex_;
  std::condition_variable_any released_;
  std::map<std::string, std::unique_ptr<Tag>, std::less<>> tags_;
  std::map<CUdeviceptr, std::shared_ptr<Allocation>> by_address_;
  std::atomic<uint64_t> sequence_{0};
  std::vector<HeldBytes> held_;
  size_t busy_count_ = 0;  // tags that operations hold
  mutable std::atomic<uint64_t> look_count_{0};
};

}  // namespace ebbtide
