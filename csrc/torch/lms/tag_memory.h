// The memory of one or several tags of LMS's that lies on the device or on the host, at the same addresses, and its
// moves. It has no state of its own, and no lock: the caller sees to it that nothing uses the memory while it moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "api/ebbtide.h"

namespace ebbtide::lms {

// What came of a move. What does not fit stays where it is; that is no failure.
struct Moved {
  uint64_t bytes = 0;
  bool has_failed = false;
  bool is_broken = false;  // after a failure some of the memory is not mapped, until mend()
  std::string problem;     // why it failed; "" where the move was refused, as if it had not been tried
};

class TagMemory {
 public:
  // The list and the names outlive it.
  template <size_t kCount>
  explicit constexpr TagMemory(const char* const (&tags)[kCount]) : tags_(tags), tag_count_(kCount) {}

  bool has(const char* tag) const noexcept;
  struct Amounts {
    uint64_t resident_bytes = 0, host_bytes = 0, detached_bytes = 0;
    size_t allocation_count = 0;
  };
  Amounts query() const noexcept;
  std::vector<ebbtide_allocation_info> allocations() const;  // throws std::bad_alloc
  // At most so many bytes, of all allocations or of those that begin at these addresses. addresses must not be empty
  // then.
  Moved demote(uint64_t most_bytes) const noexcept { return move(&ebbtide_demote, {}, most_bytes); }
  Moved demote(const std::vector<const void*>& addresses) const noexcept {
    return move(&ebbtide_demote, addresses, UINT64_MAX);
  }
  // keeps_host: what does not change goes back without a copy.
  Moved promote(uint64_t most_bytes, bool keeps_host) const noexcept {
    return move(&ebbtide_promote, {}, most_bytes, keeps_host);
  }
  Moved promote(const std::vector<const void*>& addresses, bool keeps_host) const noexcept {
    return move(&ebbtide_promote, addresses, UINT64_MAX, keeps_host);
  }
  // Maps what a failed move left without a mapping. Whether all is mapped now.
  bool mend() const noexcept;

 private:
  using Operation = ebbtide_status (*)(const ebbtide_request*, ebbtide_report**, ebbtide_error*);
  Moved move(Operation operation, const std::vector<const void*>& addresses, uint64_t most_bytes,
             bool keeps_host = false) const noexcept;
  ebbtide_request request() const noexcept;

  const char* const* const tags_;
  const size_t tag_count_;
};

}  // namespace ebbtide::lms
