#include "policy/lms/margin.h"

#include <algorithm>

namespace ebbtide::policy {
namespace {

constexpr uint64_t kLargestPart = 2;      // of the limit, one in so many
constexpr uint64_t kMostPatience = 4096;  // steps

}  // namespace

uint64_t Margin::bytes(uint64_t limit_bytes) const { return std::min(bytes_, limit_bytes / kLargestPart); }

bool Margin::note(uint64_t missing_bytes, uint64_t limit_bytes) {
  const uint64_t before_bytes = bytes_;
  if (missing_bytes > 0) {
    if (has_fallen_) patience_ = std::min(2 * patience_, kMostPatience);
    has_fallen_ = false;
    quiet_steps_ = 0;
    bytes_ = std::max(bytes_, std::min(bytes_ + std::min(missing_bytes, limit_bytes), limit_bytes / kLargestPart));
  } else if (bytes_ > 0 && ++quiet_steps_ >= patience_) {
    has_fallen_ = true;
    quiet_steps_ = 0;
    bytes_ -= (bytes_ + 3) / 4;
  }
  return bytes_ != before_bytes;
}

}  // namespace ebbtide::policy
