#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "core/registry/registry.h"

// How operations take hold of tags, and let go.
namespace ebbtide {

void Registry::throw_unknown(const std::string& name, const char* advice) const {
  constexpr size_t kMaxListed = 20;
  constexpr size_t kMaxListedBytes = 600;  // an ebbtide_error holds 1023, and the rest of the sentence matters more
  std::string known;
  size_t listed = 0;
  for (const auto& [tag_name, tag] : tags_) {
    if (listed == kMaxListed || known.size() + tag_name.size() > kMaxListedBytes) {
      known += ", and " + std::to_string(tags_.size() - listed) + " more";
      break;
    }
    known += (listed++ == 0 ? "'" : ", '") + tag_name + "'";
  }
  throw StateError("no region was ever named '" + name + "'; known tags: " + (known.empty() ? "none" : known) + advice);
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
      throw_unknown(name, ". Operations skip unknown ones with missing_ok");
    }
    if (std::exchange(found->second->mark, mark) != mark) tags.push_back(found->second.get());
  }
  return tags;
}

namespace {

void check_leases(const Tag& tag) {
  if (tag.leases.empty()) return;
  throw StateError("tag '" + tag.name + "' is in use: " + tag.leases.begin()->second +
                   " is inside its region, where torch may hand out this memory at any moment. Leave the region first");
}

}  // namespace

std::vector<Tag*> Registry::wait_until_free(std::unique_lock<HandlerSafeMutex>& lock,
                                            const std::vector<TagClaim>& claims) {
  while (true) {
    std::vector<Tag*> tags;
    for (const TagClaim& claim : claims) {
      const std::vector<Tag*> claimed = resolve(claim.tags);
      tags.insert(tags.end(), claimed.begin(), claimed.end());
    }
    if (claims.size() > 1) {  // which may name the same ones
      const uint64_t mark = ++mark_;
      std::erase_if(tags, [&](Tag* tag) { return std::exchange(tag->mark, mark) == mark; });
    }
    // All at once, so that two operations never wait for each other.
    if (std::none_of(tags.begin(), tags.end(), [](const Tag* tag) { return tag->is_busy; })) return tags;
    released_.wait(lock);
  }
}

void Registry::select(const std::vector<Tag*>& tags, Selection::Group& group) {
  const TagClaim& claim = group.claim;
  if (claim.tags.addresses.empty() || claim.is_among_all) {
    for (const Tag* tag : tags) {
      look(tag->allocations.size());
      for (const auto& [sequence, allocation] : tag->allocations) {
        if (claim.concerns(*allocation)) group.allocations.push_back(allocation);
      }
    }
    return;
  }
  const uint64_t mark = ++mark_;
  for (Tag* tag : tags) tag->mark = mark;
  std::vector<CUdeviceptr> addresses = claim.tags.addresses;
  std::sort(addresses.begin(), addresses.end());
  addresses.erase(std::unique(addresses.begin(), addresses.end()), addresses.end());
  look(addresses.size());
  for (const CUdeviceptr address : addresses) {
    const auto found = by_address_.find(address);
    if (found == by_address_.end() || found->second->tag->mark != mark) continue;
    if (claim.concerns(*found->second)) group.allocations.push_back(found->second);
  }
  std::sort(group.allocations.begin(), group.allocations.end(),
            [](const auto& one, const auto& other) { return one->sequence < other->sequence; });
}

// The tags whose memory a claim takes away. Throws where one of them is leased.
void Registry::require_unleased(const std::vector<Tag*>& tags, Selection::Group& group) {
  std::vector<Tag*>& losing = group.losing_tags;
  if (group.claim.leases == TagClaim::Leases::kRefused) losing = tags;
  if (group.claim.leases == TagClaim::Leases::kRefusedWhereMemoryIs) {
    const uint64_t mark = ++mark_;
    for (const auto& allocation : group.allocations) {
      if (allocation->has_memory() && std::exchange(allocation->tag->mark, mark) != mark)
        losing.push_back(allocation->tag);
    }
  }
  for (const Tag* tag : losing) check_leases(*tag);
}

Selection Registry::choose(std::unique_lock<HandlerSafeMutex>& lock, std::vector<TagClaim> claims) {
  for (const TagClaim& claim : claims) {
    for (const std::string& name : claim.tags.names) check_tag_name(name);
  }
  Selection selection;
  selection.tags = wait_until_free(lock, claims);
  for (TagClaim& claim : claims) {
    const std::vector<Tag*> tags = resolve(claim.tags);
    Selection::Group& group = selection.groups.emplace_back(Selection::Group{std::move(claim), {}, {}, {}});
    for (const Tag* tag : tags) selection.last_lease = std::max(selection.last_lease, tag->last_lease);
    if (group.claim.finishes_tags) group.whole_tags = tags;
    select(tags, group);
    require_unleased(tags, group);
  }
  return selection;
}

Selection Registry::claim(std::vector<TagClaim> claims) {
  std::unique_lock lock(mutex_);
  Selection selection = choose(lock, std::move(claims));
  const auto& groups = selection.groups;
  hold(selection,
       std::any_of(groups.begin(), groups.end(), [](const auto& group) { return group.claim.moves_memory; }));
  for (const auto& group : groups) {
    for (Tag* tag : group.losing_tags) ++tag->epoch;
  }
  return selection;
}

void Registry::preview(std::vector<TagClaim> claims,
                       const std::function<void(size_t claim, const Allocation&)>& visit) {
  std::unique_lock lock(mutex_);
  const Selection selection = choose(lock, std::move(claims));
  for (size_t index = 0; index < selection.groups.size(); ++index) {
    for (const auto& allocation : selection.groups[index].allocations) visit(index, *allocation);
  }
}

void Registry::wait_for(const TagRequest& tags) {
  std::unique_lock lock(mutex_);
  wait_until_free(lock, {{.tags = tags, .concerns = {}}});
}

// Throws, with nothing held, where there is no memory.
void Registry::hold(Selection& selection, bool moves_memory) {
  size_t count = 0;
  for (const auto& group : selection.groups) count += group.allocations.size();
  selection.doomed.reserve(count);
  begin_step(selection);
  // Nothing below throws.
  for (const auto& group : selection.groups) {
    for (const auto& allocation : group.allocations) allocation->is_held = true;
  }
  for (Tag* tag : selection.tags) {
    tag->is_busy = true;
    tag->is_moving = moves_memory;
    tag->step = selection.step;
  }
  busy_count_ += selection.tags.size();
}

void Registry::begin_step(Selection& selection) {
  const bool is_step = !selection.groups.empty() && std::all_of(selection.groups.begin(), selection.groups.end(),
                                                                [](const auto& group) { return group.claim.is_step; });
  if (!is_step) return;
  steps_.emplace(step_sequence_ + 1, Step{std::this_thread::get_id()});
  selection.step = ++step_sequence_;
}

void Registry::end_step(uint64_t step) noexcept {
  if (step == 0) return;
  const std::lock_guard lock(mutex_);
  const auto ended = steps_.find(step);
  freeing_steps_ += ended->second.has_freed_memory ? 1 : 0;
  steps_.erase(ended);
  released_.notify_all();
}

bool Registry::is_in_step_locked() const {
  return std::any_of(steps_.begin(), steps_.end(),
                     [self = std::this_thread::get_id()](const auto& each) { return each.second.thread == self; });
}

bool Registry::is_in_step() const {
  const std::lock_guard lock(mutex_);
  return is_in_step_locked();
}

bool Registry::wait_for_steps(Steps which) {
  std::unique_lock lock(mutex_);
  if (is_in_step_locked()) return false;
  const auto is_over = [&, newest = step_sequence_] {
    return std::none_of(steps_.begin(), steps_.end(), [&](const auto& each) {
      return each.first <= newest && (which == Steps::kAll || each.second.has_freed_memory);
    });
  };
  if (is_over()) return false;
  released_.wait(lock, is_over);
  return true;
}

Selection Registry::claim_idle(const std::function<bool(const Allocation&)>& concerns) {
  const std::lock_guard lock(mutex_);
  Selection selection;
  auto& allocations = selection.groups.emplace_back().allocations;
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
  hold(selection, false);
  return selection;
}

// Which tags are left midway: some of what the operation held of them has moved and some has not.
void Registry::note_what_is_left(const Selection& selection) noexcept {
  for (Tag* tag : selection.tags) tag->is_any_left_away = tag->is_any_left_here = false;
  for (const auto& group : selection.groups) {
    for (const auto& allocation : group.allocations) {
      if (allocation->is_doomed) continue;
      allocation->tag->is_any_left_away |= allocation->is_away();
      // Memory that a pause has yet to give back is a part of what is left to do; memory that a resume could not use is
      // not.
      allocation->tag->is_any_left_here |=
          allocation->device_bytes() > 0 || (group.claim.takes_stale_memory && allocation->has_stale_memory());
    }
  }
  for (Tag* tag : selection.tags) tag->is_partial = tag->is_any_left_away && tag->is_any_left_here;
}

void Registry::count_pauses(const Selection& selection) noexcept {
  const uint64_t mark = ++mark_;
  for (const auto& group : selection.groups) {
    if (!group.claim.counts_as_pause) continue;
    for (const auto& allocation : group.allocations) {
      if (std::exchange(allocation->tag->mark, mark) != mark) ++allocation->tag->pause_count;
    }
  }
}

std::vector<std::shared_ptr<Allocation>> Registry::release(Selection& selection, Outcome outcome) noexcept {
  std::vector<std::shared_ptr<Allocation>> doomed = std::move(selection.doomed);
  const std::lock_guard lock(mutex_);
  if (outcome == Outcome::kMidway) note_what_is_left(selection);
  if (outcome != Outcome::kUntouched) count_pauses(selection);
  for (const auto& group : selection.groups) {
    for (Tag* tag : group.whole_tags) {
      if (outcome == Outcome::kWhole) tag->is_partial = false;
    }
    look(group.allocations.size());
    for (const auto& allocation : group.allocations) {
      if (allocation->is_doomed && allocation->is_held) {  // which ends here, where another group has it too
        erase_locked(allocation);
        doomed.push_back(allocation);
      }
      allocation->is_held = false;
      if (group.claim.marks_trimmed && outcome != Outcome::kUntouched && allocation->is_away())
        allocation->is_trimmed = true;
      if (!allocation->is_away()) allocation->is_trimmed = false;
      if (!allocation->is_doomed) count(*allocation, allocation->amounts());
    }
  }
  busy_count_ -= selection.tags.size();
  for (Tag* tag : selection.tags) {
    tag->is_busy = tag->is_moving = false;
    tag->step = 0;
    const Amounts sum = tag->total();
    if (sum.away_count == 0 || sum.here_count == 0) tag->is_partial = false;
  }
  selection.tags.clear();
  selection.groups.clear();  // the registry, or doomed, has them still
  released_.notify_all();
  return doomed;
}

}  // namespace ebbtide
