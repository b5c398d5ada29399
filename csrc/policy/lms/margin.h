#pragma once

#include <cstdint>

// What plans leave free of the limit, because memory was short in spite of one: free memory lies in pieces, and sizes
// vary from step to step. Used by the torch extension as well: standard C++ only. Not thread-safe.
namespace ebbtide::policy {

class Margin {
 public:
  // Of plans within this limit: at most half of it.
  uint64_t bytes(uint64_t limit_bytes) const;
  // A step has ended in which so many bytes were missing at most, beside the margin. It grows at once, and falls by a
  // quarter after some steps without a shortage: the more seldom, the more often that was too early. Returns whether it
  // has changed.
  bool note(uint64_t missing_bytes, uint64_t limit_bytes);

 private:
  uint64_t bytes_ = 0;
  uint64_t quiet_steps_ = 0, patience_ = 32;
  bool has_fallen_ = false;
};

}  // namespace ebbtide::policy
