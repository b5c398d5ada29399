#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

// When torch's cache is given back between two steps. Where its memory is in pages, a flush in a step unmaps what is
// free then, and what is in use stays mapped in islands. Later steps fill those, map what does not fit there, and reach
// the limit: each of them flushes, until all is given back once while little is in use. Used by the torch extension as
// well: standard C++ only. Not thread-safe.
namespace ebbtide::policy {

class Flushes {
 public:
  enum class Advice { kKeep, kWait, kGiveBack };  // kWait: until less is in use between steps

  // A step has ended.
  Advice note(bool has_flushed, bool is_little_used) {
    ++steps_;
    if (has_flushed && quiet_steps_ == 0) quiet_steps_ = steps_;
    is_needed_ = steps_ > patience_ && (is_needed_ || has_flushed);
    if (!is_needed_) return Advice::kKeep;
    if (!is_little_used) return Advice::kWait;
    // Where it did not help for long, it costs more than it spares.
    patience_ = quiet_steps_ > kLongQuiet ? kFirstPatience : std::clamp(2 * patience_, kFirstPatience, kMostPatience);
    steps_ = quiet_steps_ = 0;
    is_needed_ = false;
    return Advice::kGiveBack;
  }

 private:
  static constexpr uint64_t kFirstPatience = 4, kMostPatience = 4096, kLongQuiet = 64;  // steps
  uint64_t steps_ = 0;                                                                  // since it was given back
  uint64_t quiet_steps_ = 0;  // of these, up to the first flush
  uint64_t patience_ = 0;
  bool is_needed_ = false;
};

// Whether less is in use between two steps than between most: gradients are in use between two that are accumulated.
class LittleUse {
 public:
  bool note(uint64_t used_bytes, uint64_t tolerance_bytes) {
    latest_[count_++ % latest_.size()] = used_bytes;
    const auto end = latest_.begin() + static_cast<std::ptrdiff_t>(std::min<uint64_t>(count_, latest_.size()));
    return used_bytes <= *std::min_element(latest_.begin(), end) + tolerance_bytes;
  }

 private:
  std::array<uint64_t, 8> latest_{};
  uint64_t count_ = 0;
};

}  // namespace ebbtide::policy
