// What a thread's own allocations get in a preloaded program: that of its innermost frame that says so.
#include <algorithm>
#include <iterator>

#include "bindings/frames.h"

namespace ebbtide::bindings {

// The nearest inner frame that has a policy; null if there is none.
FramePointer FrameStack::next_with_policy(const FramePointer& frame) const {
  const auto place = std::find(frames_.begin(), frames_.end(), frame);
  if (place == frames_.end()) return nullptr;
  const auto found = std::find_if(std::next(place), frames_.end(), [](const FramePointer& other) {
    return other->policy.tagging != EBBTIDE_TAGGING_UNSET;
  });
  return found == frames_.end() ? nullptr : *found;
}

void FrameStack::apply_policy(const FramePointer& frame) {
  if (frame->policy.tagging == EBBTIDE_TAGGING_UNSET) return;
  const FramePointer inner = next_with_policy(frame);
  if (inner != nullptr) {
    frame->replaced_policy = inner->replaced_policy;
  } else {
    ebbtide_get_thread_policy(&frame->replaced_policy, nullptr);
  }
  ebbtide_thread_policy inside = frame->policy;
  if (inside.tagging == EBBTIDE_TAGGING_OFF) {
    inside = frame->replaced_policy;
    inside.tagging = EBBTIDE_TAGGING_OFF;
    inside.lease = 0;
  }
  if (inner != nullptr) {
    inner->replaced_policy = inside;
  } else {
    ebbtide_set_thread_policy(&inside, nullptr);
  }
}

// Frames need not end in order. The policy that one replaced belongs to the next inner one then. Another thread cannot
// set this one's: a region's ends with its lease, and that of `disabled()` when this thread next leaves or enters one.
void FrameStack::undo_policy(const FramePointer& frame) {
  const bool is_open = std::find(frames_.begin(), frames_.end(), frame) != frames_.end();
  if (!is_open || frame->policy.tagging == EBBTIDE_TAGGING_UNSET) return;
  if (const FramePointer inner = next_with_policy(frame)) {
    inner->replaced_policy = frame->replaced_policy;
  } else if (is_mine()) {
    ebbtide_set_thread_policy(&frame->replaced_policy, nullptr);
  }
}

}  // namespace ebbtide::bindings
