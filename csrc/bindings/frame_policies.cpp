// What a thread's own allocations get in a preloaded program: that of its innermost frame that says so.
#include <algorithm>
#include <iterator>

#include "bindings/frames.h"

namespace ebbtide::bindings {
namespace {

// OFF keeps the tag and backup from outside.
ebbtide_thread_policy policy_inside(const ebbtide_thread_policy& policy, const ebbtide_thread_policy& outside) {
  if (policy.tagging != EBBTIDE_TAGGING_OFF) return policy;
  ebbtide_thread_policy off = outside;
  off.tagging = EBBTIDE_TAGGING_OFF;
  off.lease = 0;
  return off;
}

}  // namespace

// The nearest inner frame that has a policy; null if there is none.
FramePointer FrameStack::next_with_policy(const FramePointer& frame) const {
  const auto place = std::find(frames_.begin(), frames_.end(), frame);
  if (place == frames_.end()) return nullptr;
  const auto found = std::find_if(std::next(place), frames_.end(), [](const FramePointer& other) {
    return other->policy.tagging != EBBTIDE_TAGGING_UNSET;
  });
  return found == frames_.end() ? nullptr : *found;
}

// The policy outside of an inner frame is another one now.
void FrameStack::put_below(const FramePointer& inner, const ebbtide_thread_policy& policy) {
  inner->replaced_policy = policy;
  if (inner->policy.tagging != EBBTIDE_TAGGING_OFF || !is_mine()) return;
  const ebbtide_thread_policy off = policy_inside(inner->policy, policy);
  if (const FramePointer next = next_with_policy(inner)) return put_below(next, off);
  ebbtide_set_thread_policy(&off, nullptr);
}

void FrameStack::apply_policy(const FramePointer& frame) {
  if (frame->policy.tagging == EBBTIDE_TAGGING_UNSET) return;
  if (const FramePointer inner = next_with_policy(frame)) {
    frame->replaced_policy = inner->replaced_policy;
    return put_below(inner, policy_inside(frame->policy, frame->replaced_policy));
  }
  ebbtide_get_thread_policy(&frame->replaced_policy, nullptr);
  const ebbtide_thread_policy policy = policy_inside(frame->policy, frame->replaced_policy);
  ebbtide_set_thread_policy(&policy, nullptr);
}

// Frames need not end in order. The policy that one replaced belongs to the next inner one then. Another thread cannot
// set this one's: a region's ends with its lease, and that of `disabled()` when this thread next leaves or enters one.
void FrameStack::undo_policy(const FramePointer& frame) {
  const bool is_open = std::find(frames_.begin(), frames_.end(), frame) != frames_.end();
  if (!is_open || frame->policy.tagging == EBBTIDE_TAGGING_UNSET) return;
  if (const FramePointer inner = next_with_policy(frame)) {
    put_below(inner, frame->replaced_policy);
  } else if (is_mine()) {
    ebbtide_set_thread_policy(&frame->replaced_policy, nullptr);
  }
}

}  // namespace ebbtide::bindings
