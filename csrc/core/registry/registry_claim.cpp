#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "core/registry/registry.h"

// How operations take hold of tags, and let go.
namespace ebbtide {

void Registry::throw_unknown(const std::string& name) const {
  constexpr size_t kMaxListed = 20;
  std::string known;
  size_t listed = 0;
  for (const auto& [tag_name, tag] : tags_) {
    if (listed == kMaxListed) {
      known += ", and " + std::to_string(tags_.size() - listed) + " more";
      break;
    }
    known += (listed++ == 0 ? "'" : ", '") + tag_name + "'";
  }
  throw StateError("no region was ever named '" + name + "'; known tags: " + (known.empty() ? "none" : known) +
                   ". Operations skip unknown ones with missing_ok");
}

std::vector<Tag*> Registry::resolve(const TagRequest& request) {
  std::vector<Tag*> tags;
  if (request.names.empty()) {
    look(tags_.size());
    for (const auto& [name, tag] : tags_) tags.push_back(tag.get());
    return tags;
  }
  const uint64_t mark = ++mark_;
  for (const std::string& name : request.names) {
    const auto found = tags_.find(name);
    if (found == tags_.end()) {
      if (request.is_missing_ok) continue;
      throw_unknown(name);
    }
    if (std::exchange(found->second->mark, mark) != mark) tags.push_back(found->second.get());
  }
  return tags;
}

namespace {

// Of those that its tags and addresses name.
bool concerns(const ClaimPart& part, const Allocation& allocation) {
  const bool is_named = !part.tags.addresses.empty();
  if (part.kind == OperationKind::kResume && part.tags.only != nullptr &&
      (allocation.is_trimmed || !part.tags.only->contains(allocation))) {
    return false;
  }
  switch (part.kind) {
    case OperationKind::kSeparate: return allocation.device_bytes() > 0;
    case OperationKind::kResume: return allocation.wants_resume() && (!allocation.is_trimmed || is_named);
    case OperationKind::kShow: return allocation.is_away();
    case OperationKind::kPrepare: return allocation.device_bytes() > 0;
    case OperationKind::kPromote: return allocation.wants_promotion();
    case OperationKind::kPause: return allocation.wants_pause();
    case OperationKind::kTrim: return allocation.wants_trim();
    default: return allocation.has_memory();
  }
}

// Memory that a thread in the tag's region might be handed at any moment.
bool takes_memory_away(const ClaimPart& part) {
  return part.kind == OperationKind::kPause || part.kind == OperationKind::kPromote ||
         part.kind == OperationKind::kSeparate;
}

// What prepares a tag, or moves some of its allocations, does not finish what another operation left midway.
bool is_of_whole_tags(const ClaimPart& part) {
  if (!part.tags.addresses.empty()) return false;
  return part.kind == OperationKind::kPause || (part.kind == OperationKind::kResume && part.tags.only == nullptr);
}

bool moves_memory(const ClaimPart& part) {
  return part.kind != OperationKind::kPrepare && part.kind != OperationKind::kShow;
}

void check_leases(const Tag& tag) {
  if (tag.leases.empty()) return;
  throw StateError("tag '" + tag.name + "' can't be paused: " + tag.leases.begin()->second +
                   " is inside its region, where torch may hand out this memory at any moment. Leave the region first");
}

}  // namespace

std::vector<Tag*> Registry::wait_until_free(std::unique_lock<std::mutex>& lock, std::span<const ClaimPart> parts) {
  while (true) {
    std::vector<Tag*> tags;
    for (const ClaimPart& part : parts) {
      const std::vector<Tag*> of_part = resolve(part.tags);
      tags.insert(tags.end(), of_part.begin(), of_part.end());
    }
    if (parts.size() > 1) {  // which may name the same ones
      const uint64_t mark = ++mark_;
      std::erase_if(tags, [&](Tag* tag) { return std::exchange(tag->mark, mark) == mark; });
    }
    // All at once, so that two operations never wait for each other.
    if (std::none_of(tags.begin(), tags.end(), [](const Tag* tag) { return tag->is_busy; })) return tags;
    released_.wait(lock);
  }
}

void Registry::select(const ClaimPart& part, const std::vector<Tag*>& tags,
                      std::vector<std::shared_ptr<Allocation>>& allocations) {
  // Who shares memory with whom, a separation finds among all of the tags.
  if (part.tags.addresses.empty() || part.kind == OperationKind::kSeparate) {
    for (const Tag* tag : tags) {
      look(tag->allocations.size());
      for (const auto& [sequence, allocation] : tag->allocations) {
        if (concerns(part, *allocation)) allocations.push_back(allocation);
      }
    }
    return;
  }
  const uint64_t mark = ++mark_;
  for (Tag* tag : tags) tag->mark = mark;
  std::vector<CUdeviceptr> addresses = part.tags.addresses;
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  look(addresses.size());
  for (const CUdeviceptr address : addresses) {
    const auto found = by_address_.find(address);
    if (found == by_address_.end() || found->second->tag->mark != mark) continue;
    if (concerns(part, *found->second)) allocations.push_back(found->second);
  }
  std::sort(allocations.begin(), allocations.end(),
            [](const auto& one, const auto& other) { return one->sequence < other->sequence; });
}

Selection Registry::claim(std::span<const ClaimPart> parts) {
  for (const ClaimPart& part : parts) {
    for (const std::string& name : part.tags.names) check_tag_name(name);
  }
  std::unique_lock lock(mutex_);
  Selection selection;
  selection.tags = wait_until_free(lock, parts);
  std::vector<Tag*> pausing;
  size_t count = 0;
  for (const ClaimPart& part : parts) {
    Selection::Part& selected = selection.parts.emplace_back(part.kind);
    auto& allocations = selected.allocations;
    const std::vector<Tag*> tags = resolve(part.tags);
    for (Tag* tag : tags) {
      if (takes_memory_away(part)) {
        check_leases(*tag);
        pausing.push_back(tag);
      }
      if (is_of_whole_tags(part)) selected.whole_tags.push_back(tag);
      selection.last_lease = std::max(selection.last_lease, tag->last_lease);
    }
    select(part, tags, allocations);
    if (part.kind == OperationKind::kTrim) {  // one of what is away takes no memory
      const uint64_t mark = ++mark_;
      for (const auto& allocation : allocations) {
        if (!allocation->has_memory() || std::exchange(allocation->tag->mark, mark) == mark) continue;
        check_leases(*allocation->tag);
        pausing.push_back(allocation->tag);
      }
    }
    count += allocations.size();
  }
  selection.doomed.reserve(count);
  // Nothing below throws.
  for (const auto& part : selection.parts) {
    for (const auto& allocation : part.allocations) allocation->is_held = true;
  }
  for (Tag* tag : selection.tags) {
    tag->is_busy = true;
    tag->is_moving = std::any_of(parts.begin(), parts.end(), [](const ClaimPart& part) { return moves_memory(part); });
  }
  busy_count_ += selection.tags.size();
  for (Tag* tag : pausing) ++tag->epoch;
  return selection;
}

Selection Registry::claim_idle(const std::function<bool(const Allocation&)>& concerns) {
  const std::lock_guard lock(mutex_);
  Selection selection;
  auto& allocations = selection.parts.emplace_back(OperationKind::kGrant).allocations;
  look(by_address_.size());
  for (const auto& [name, tag] : tags_) {
    selection.has_left_any |= tag->is_busy;
    if (tag->is_busy) continue;
    const size_t count = allocations.size();
    for (const auto& [sequence, allocation] : tag->allocations) {
      if (concerns(*allocation)) allocations.push_back(allocation);
    }
    if (allocations.size() > count) selection.tags.push_back(tag.get());
  }
  selection.doomed.reserve(allocations.size());
  // Nothing below throws.
  for (const auto& allocation : allocations) allocation->is_held = true;
  for (Tag* tag : selection.tags) tag->is_busy = true;
  busy_count_ += selection.tags.size();
  return selection;
}

// Which tags are left midway: some of what the operation held of them has moved and some has not.
void Registry::note_what_is_left(const Selection& selection) noexcept {
  for (Tag* tag : selection.tags) tag->is_any_left_away = tag->is_any_left_here = false;
  for (const auto& part : selection.parts) {
    for (const auto& allocation : part.allocations) {
      if (allocation->is_doomed) continue;
      allocation->tag->is_any_left_away |= allocation->is_away();
      // Memory that a pause has yet to give back is a part of what is left to do; memory that a resume could not use is not.
      allocation->tag->is_any_left_here |=
          allocation->device_bytes() > 0 || (part.kind != OperationKind::kResume && allocation->has_stale_memory());
    }
  }
  for (Tag* tag : selection.tags) tag->is_partial = tag->is_any_left_away && tag->is_any_left_here;
}

void Registry::count_pauses(const Selection& selection) noexcept {
  const uint64_t mark = ++mark_;
  for (const auto& part : selection.parts) {
    if (part.kind != OperationKind::kPause) continue;
    for (const auto& allocation : part.allocations) {
      if (std::exchange(allocation->tag->mark, mark) != mark) ++allocation->tag->pause_count;
    }
  }
}

std::vector<std::shared_ptr<Allocation>> Registry::release(Selection& selection, Outcome outcome) noexcept {
  std::vector<std::shared_ptr<Allocation>> doomed = std::move(selection.doomed);
  const std::lock_guard lock(mutex_);
  if (outcome == Outcome::kMidway) note_what_is_left(selection);
  if (outcome != Outcome::kUntouched) count_pauses(selection);
  for (const auto& part : selection.parts) {
    for (Tag* tag : part.whole_tags) {
      if (outcome == Outcome::kWhole) tag->is_partial = false;
    }
    look(part.allocations.size());
    for (const auto& allocation : part.allocations) {
      if (allocation->is_doomed) {
        erase_locked(allocation);
        doomed.push_back(allocation);
      }
      allocation->is_held = false;
      if (part.kind == OperationKind::kTrim && outcome != Outcome::kUntouched && allocation->is_away())
        allocation->is_trimmed = true;
      if (!allocation->is_away()) allocation->is_trimmed = false;
      if (!allocation->is_doomed) count(*allocation, allocation->amounts());
    }
  }
  busy_count_ -= selection.tags.size();
  for (Tag* tag : selection.tags) {
    tag->is_busy = tag->is_moving = false;
    const Amounts sum = tag->total();
    if (sum.away_count == 0 || sum.here_count == 0) tag->is_partial = false;
  }
  selection.tags.clear();
  selection.parts.clear();  // the registry, or doomed, has them still
  released_.notify_all();
  return doomed;
}

}  // namespace ebbtide
