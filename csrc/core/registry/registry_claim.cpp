#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <span>
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

// Each once, in the order of the request.
std::vector<Tag*> Registry::resolve(const TagRequest& request) const {
  std::vector<Tag*> tags;
  if (request.names.empty()) {
    look(tags_.size());
    for (const auto& [name, tag] : tags_) tags.push_back(tag.get());
    return tags;
  }
  std::set<const Tag*> seen;
  for (const std::string& name : request.names) {
    const auto found = tags_.find(name);
    if (found == tags_.end()) {
      if (request.is_missing_ok) continue;
      throw_unknown(name, ". Operations skip unknown ones with missing_ok");
    }
    if (seen.insert(found->second.get()).second) tags.push_back(found->second.get());
  }
  return tags;
}

std::vector<Tag*> Registry::resolve_all(const std::vector<TagClaim>& claims) const {
  std::vector<Tag*> tags;
  std::set<const Tag*> seen;  // several claims may name the same ones
  for (const TagClaim& claim : claims) {
    for (Tag* const tag : resolve(claim.tags)) {
      if (claims.size() == 1 || seen.insert(tag).second) tags.push_back(tag);
    }
  }
  return tags;
}

namespace {

void check_leases(const Tag& tag) {
  if (tag.leases.empty()) return;
  throw StateError("tag '" + tag.name + "' is in use: " + tag.leases.begin()->second +
                   " is inside its region, where torch may hand out this memory at any moment. Leave the region first");
}

// Where memory of the group leaves.
void check_lent(const Selection::Group& group) {
  if (group.claim.leases == TagClaim::Leases::kAllowed || group.claim.is_among_all) return;
  for (const auto& allocation : group.allocations) {
    const bool may_leave =
        allocation->refusal_count == 0 && (allocation->lent_count == 0 || group.claim.asks_borrowers);
    if (may_leave || !allocation->has_memory()) continue;
    throw StateError("tag '" + allocation->tag->name +
                         "' has memory that another process uses: it can leave when that process has let go of it",
                     Cause::kLent);
  }
}

}  // namespace

std::vector<Tag*> Registry::wait_until_free(std::unique_lock<HandlerSafeMutex>& lock,
                                            const std::vector<TagClaim>& claims) {
  while (true) {
    std::vector<Tag*> tags = resolve_all(claims);
    // All at once, so that two operations never wait for each other.
    if (std::none_of(tags.begin(), tags.end(), [](const Tag* tag) { return tag->is_busy; })) return tags;
    if (!claims.front().may_wait) throw BusyError("an operation on this tag is under way");
    released_.wait(lock);
  }
}

void Registry::select(Selection::Group& group) const {
  const TagClaim& claim = group.claim;
  if (claim.tags.addresses.empty() || claim.is_among_all) {
    for (const Tag* tag : group.tags) {
      look(tag->allocations.size());
      for (const auto& [sequence, allocation] : tag->allocations) {
        if (claim.concerns(*allocation)) group.allocations.push_back(allocation);
      }
    }
    return;
  }
  std::map<const Tag*, size_t> tags;  // by their order in the group
  for (const Tag* tag : group.tags) tags.emplace(tag, tags.size());
  const std::set<CUdeviceptr> addresses(claim.tags.addresses.begin(), claim.tags.addresses.end());
  look(addresses.size());
  for (const CUdeviceptr address : addresses) {
    const auto found = by_address_.find(address);
    if (found == by_address_.end() || !tags.contains(found->second->tag)) continue;
    if (claim.concerns(*found->second)) group.allocations.push_back(found->second);
  }
  std::sort(group.allocations.begin(), group.allocations.end(), [&](const auto& one, const auto& other) {
    return std::pair(tags.at(one->tag), one->sequence) < std::pair(tags.at(other->tag), other->sequence);
  });
}

namespace {

// The tags whose memory a claim takes away.
std::vector<Tag*> find_losing_tags(const Selection::Group& group) {
  if (group.claim.leases == TagClaim::Leases::kAllowed) return {};
  if (group.claim.leases == TagClaim::Leases::kRefused) return group.tags;
  std::set<Tag*> losing;
  for (const auto& allocation : group.allocations) {
    if (allocation->has_memory()) losing.insert(allocation->tag);
  }
  return {losing.begin(), losing.end()};
}

}  // namespace

Selection Registry::choose(std::unique_lock<HandlerSafeMutex>& lock, std::vector<TagClaim> claims) {
  for (const TagClaim& claim : claims) {
    for (const std::string& name : claim.tags.names) check_tag_name(name);
  }
  Selection selection;
  selection.tags = wait_until_free(lock, claims);
  for (TagClaim& claim : claims) {
    Selection::Group& group = selection.groups.emplace_back(Selection::Group{std::move(claim), {}, {}, {}});
    group.tags = resolve(group.claim.tags);
    for (const Tag* tag : group.tags) selection.last_lease = std::max(selection.last_lease, tag->last_lease);
    select(group);
    group.losing_tags = find_losing_tags(group);
    for (const Tag* tag : group.losing_tags) check_leases(*tag);
  }
  return selection;
}

Selection Registry::claim(std::vector<TagClaim> claims) {
  std::unique_lock lock(mutex_);
  Selection selection = choose(lock, std::move(claims));
  const auto& groups = selection.groups;
  for (const auto& group : groups) check_lent(group);
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
  const auto& groups = selection.groups;
  const bool is_ahead_step = !groups.empty() && std::all_of(groups.begin(), groups.end(), [](const auto& group) {
    return group.claim.is_ahead_step;
  });
  if (is_ahead_step) selection.ahead_step = ahead_steps.begin();
  // Nothing below throws.
  for (const auto& group : selection.groups) {
    for (const auto& allocation : group.allocations) allocation->is_held = true;
  }
  for (Tag* tag : selection.tags) {
    tag->is_busy = true;
    tag->is_moving = moves_memory;
    tag->ahead_step = selection.ahead_step;
  }
  busy_count_ += selection.tags.size();
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

namespace {

// Whether a tag is left midway, of which these were claimed: some have moved and some have not.
bool is_left_partial(std::span<const std::shared_ptr<Allocation>> claimed, const TagClaim& claim) noexcept {
  bool is_any_away = false, is_any_here = false;
  for (const auto& allocation : claimed) {
    if (!allocation->is_held || allocation->is_doomed) continue;
    is_any_away |= allocation->is_away();
    // Memory that a pause has yet to give back counts as remaining work; memory that a resume could not use does not.
    is_any_here |= allocation->device_bytes() > 0 || (claim.takes_stale_memory && allocation->has_stale_memory());
  }
  return is_any_away && is_any_here;
}

}  // namespace

std::vector<std::shared_ptr<Allocation>> Registry::release(Selection& selection, Outcome outcome) noexcept {
  std::vector<std::shared_ptr<Allocation>> doomed = std::move(selection.doomed);
  const std::lock_guard lock(mutex_);
  for (const auto& group : selection.groups) {
    auto next = group.allocations.begin();  // those of each tag lie together, in the order of the tags
    for (Tag* tag : group.tags) {
      const auto first = next;
      next = std::find_if(first, group.allocations.end(), [&](const auto& each) { return each->tag != tag; });
      if (outcome == Outcome::kMidway) tag->is_partial |= is_left_partial({first, next}, group.claim);
      if (outcome == Outcome::kWhole && group.claim.finishes_tags) tag->is_partial = false;
      if (outcome != Outcome::kUntouched && group.claim.counts_as_pause && first != next) ++tag->pause_count;
    }
  }
  for (const auto& group : selection.groups) {
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
    tag->ahead_step = 0;
    end_if_on_one_side(*tag);
  }
  selection.tags.clear();
  selection.groups.clear();  // the registry, or doomed, has them still
  released_.notify_all();
  return doomed;
}

}  // namespace ebbtide
