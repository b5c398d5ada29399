#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/text.h"
#include "core/registry.h"

// How operations take hold of tags, and let go.
namespace ebbtide {

void check_tag_name(const std::string& name) {
  constexpr size_t kMaxBytes = 255;
  if (name.empty()) throw InvalidArgument("a tag can't be empty");
  if (name.size() > kMaxBytes) {
    throw InvalidArgument("a tag has at most 255 bytes, this one has " + std::to_string(name.size()) + ": '" +
                          cut_utf8(name, 32) + "...'");
  }
  if (!is_utf8(name)) throw InvalidArgument("a tag is UTF-8, this one is not");
  for (const char character : name) {
    const auto byte = static_cast<unsigned char>(character);
    if (character == '*' || character == '/') throw InvalidArgument("'" + name + "': '*' and '/' are reserved in tags");
    if (byte < 0x20 || byte == 0x7f) throw InvalidArgument("a tag can't hold control characters");
  }
}

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
                   ". missing_ok=True skips unknown ones");
}

std::vector<Tag*> Registry::resolve(const TagRequest& request) {
  std::vector<Tag*> tags;
  if (request.names.empty()) {
    for (const auto& [name, tag] : tags_) tags.push_back(tag.get());
    return tags;
  }
  for (const std::string& name : request.names) {
    const auto found = tags_.find(name);
    if (found == tags_.end()) {
      if (request.is_missing_ok) continue;
      throw_unknown(name);
    }
    if (std::find(tags.begin(), tags.end(), found->second.get()) == tags.end()) tags.push_back(found->second.get());
  }
  return tags;
}

namespace {

bool concerns(const ClaimPart& part, const Allocation& allocation) {
  const std::vector<CUdeviceptr>& addresses = part.tags.addresses;
  if (part.kind == OperationKind::kSeparate) return allocation.device_bytes() > 0;  // who shares with whom, it sees
  if (!addresses.empty() && std::find(addresses.begin(), addresses.end(), allocation.address()) == addresses.end()) {
    return false;
  }
  switch (part.kind) {
    case OperationKind::kResume: return allocation.is_away() && (!allocation.is_trimmed || !addresses.empty());
    case OperationKind::kShow: return allocation.is_away();
    case OperationKind::kPrepare: return allocation.device_bytes() > 0;
    case OperationKind::kPromote: return allocation.host_bytes() > 0;
    default: return allocation.has_memory();
  }
}

bool takes_memory_away(const ClaimPart& part) {
  return part.kind == OperationKind::kPause || part.kind == OperationKind::kTrim ||
         part.kind == OperationKind::kPromote || part.kind == OperationKind::kSeparate;
}

// What prepares a tag, or moves some of its allocations, does not finish what another operation left midway.
bool is_of_whole_tags(const ClaimPart& part) {
  return (part.kind == OperationKind::kPause || part.kind == OperationKind::kResume) && part.tags.addresses.empty();
}

bool is_any_here(const Tag& tag) {
  return std::any_of(tag.allocations.begin(), tag.allocations.end(), [](const auto& entry) {
    return entry.second->device_bytes() > 0 || entry.second->has_stale_memory();
  });
}

bool moves_memory(const ClaimPart& part) {
  return part.kind != OperationKind::kPrepare && part.kind != OperationKind::kShow;
}

void check_leases(const Tag& tag) {
  if (tag.leases.empty()) return;
  throw StateError("tag '" + tag.name + "' can't be paused: " + tag.leases.begin()->second +
                   " is inside its region, where torch may hand out this memory at any moment. Leave the region first");
}

// Some of what the operation held of this tag has moved and some has not.
bool is_mixed(const Tag& tag, const Selection& selection) {
  bool is_any_away = false;
  bool is_any_here = false;
  for (const auto& part : selection.parts) {
    for (const auto& allocation : part.allocations) {
      if (allocation->tag != &tag || allocation->is_doomed) continue;
      is_any_away |= allocation->is_away();
      // Memory that a pause has yet to give back is a part of what is left to do; memory that a resume could not use is not.
      is_any_here |=
          allocation->device_bytes() > 0 || (part.kind != OperationKind::kResume && allocation->has_stale_memory());
    }
  }
  return is_any_away && is_any_here;
}

}  // namespace

std::vector<Tag*> Registry::wait_until_free(std::unique_lock<std::mutex>& lock, std::span<const ClaimPart> parts) {
  while (true) {
    std::vector<Tag*> tags;
    for (const ClaimPart& part : parts) {
      for (Tag* tag : resolve(part.tags)) {
        if (std::find(tags.begin(), tags.end(), tag) == tags.end()) tags.push_back(tag);
      }
    }
    // All at once, so that two operations never wait for each other.
    if (std::none_of(tags.begin(), tags.end(), [](const Tag* tag) { return tag->is_busy; })) return tags;
    released_.wait(lock);
  }
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
    for (Tag* tag : resolve(part.tags)) {
      if (takes_memory_away(part)) {
        check_leases(*tag);
        pausing.push_back(tag);
      }
      if (is_of_whole_tags(part)) selected.whole_tags.push_back(tag);
      selection.last_lease = std::max(selection.last_lease, tag->last_lease);
      for (const auto& [sequence, allocation] : tag->allocations) {
        if (concerns(part, *allocation)) allocations.push_back(allocation);
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
  for (Tag* tag : pausing) ++tag->epoch;
  return selection;
}

Selection Registry::claim_idle(const std::function<bool(const Allocation&)>& concerns) {
  const std::lock_guard lock(mutex_);
  Selection selection;
  auto& allocations = selection.parts.emplace_back(OperationKind::kGrant).allocations;
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
  return selection;
}

std::vector<std::shared_ptr<Allocation>> Registry::release(Selection& selection, Outcome outcome) noexcept {
  std::vector<std::shared_ptr<Allocation>> doomed = std::move(selection.doomed);
  const std::lock_guard lock(mutex_);
  for (Tag* tag : selection.tags) {
    if (outcome == Outcome::kMidway) tag->is_partial = is_mixed(*tag, selection);
  }
  for (const auto& part : selection.parts) {
    for (Tag* tag : part.whole_tags) {
      if (outcome == Outcome::kWhole) tag->is_partial = false;
    }
    for (const auto& allocation : part.allocations) {
      if (allocation->is_doomed) {
        erase_locked(allocation);
        doomed.push_back(allocation);
      }
      allocation->is_held = false;
      if (part.kind == OperationKind::kTrim && outcome != Outcome::kUntouched && allocation->is_away())
        allocation->is_trimmed = true;
      if (!allocation->is_away()) allocation->is_trimmed = false;
    }
  }
  for (Tag* tag : selection.tags) {
    tag->is_busy = tag->is_moving = false;
    tag->away_count =
        static_cast<size_t>(std::count_if(tag->allocations.begin(), tag->allocations.end(), [](const auto& entry) {
          return entry.second->is_away() && !entry.second->is_trimmed;
        }));
    if (tag->away_count == 0 || !is_any_here(*tag)) tag->is_partial = false;
  }
  selection.tags.clear();
  selection.parts.clear();  // the registry, or doomed, has them still
  released_.notify_all();
  return doomed;
}

}  // namespace ebbtide
