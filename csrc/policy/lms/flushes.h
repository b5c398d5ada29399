#pragma once

#include <algorithm>
#include <cstdint>

// When torch's cache is given back between two steps. Where its memory is in pages, a flush in a step unmaps what is
// free then, and what is in use stays mapped in islands. Later steps fill those, map what does not fit there, and reach
// the limit: each of them flushes, until all is given back once while no gradients are in use. Used by the torch
// extension as well: standard C++ only. Not thread-safe.
namespace ebbtide::policy {

class Flushes {
 public:
  enum class Advice { kKeep, kWait, kGiveBack };  // kWait: for an update

  // Whether the last step flushed though all was given back not long before.
  bool was_in_vain() const { return was_in_vain_; }

  // A step has ended. had_update: and then an optimizer's, so that gradients may be gone.
  Advice note(bool has_flushed, bool had_update) {
    ++steps_;
    if (has_flushed && first_flush_ == 0) first_flush_ = steps_;
    was_in_vain_ = has_flushed && patience_ > 0 && updates_ < kSoon && steps_ <= kLongQuiet;
    updates_ += had_update ? 1 : 0;
    is_needed_ = steps_ > patience_ && (is_needed_ || has_flushed);
    if (!is_needed_) return Advice::kKeep;
    if (!had_update) return Advice::kWait;
    // Where it did not help for long, it costs more than it spares.
    patience_ = first_flush_ > kLongQuiet ? kFirstPatience : std::clamp(2 * patience_, kFirstPatience, kMostPatience);
    steps_ = first_flush_ = updates_ = 0;
    return Advice::kGiveBack;
  }

 private:
  static constexpr uint64_t kFirstPatience = 4, kMostPatience = 4096, kLongQuiet = 64;  // steps
  static constexpr uint64_t kSoon = 16;                                                 // updates
  uint64_t steps_ = 0, updates_ = 0;                                                    // since it was given back
  uint64_t first_flush_ = 0;  // in which of these; 0: in none yet
  uint64_t patience_ = 0;
  bool is_needed_ = false, was_in_vain_ = false;
};

}  // namespace ebbtide::policy
