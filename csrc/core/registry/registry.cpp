#include "core/registry/registry.h"

#include <algorithm>
#include <cstring>

namespace ebbtide {

Tag& Registry::tag(const std::string& name) {
  check_tag_name(name);
  const std::lock_guard lock(mutex_);
  auto& slot = tags_[name];
  if (slot == nullptr) slot = std::make_unique<Tag>(name);
  return *slot;
}

void Registry::insert(std::shared_ptr<Allocation> allocation) {
  const std::lock_guard lock(mutex_);
  Tag& tag = *allocation->tag;
  add_held_row(tag, allocation->device);
  const auto by_address = by_address_.emplace(allocation->address(), allocation).first;
  try {
    tag.allocations.emplace(allocation->sequence, allocation);
  } catch (...) {
    by_address_.erase(by_address);
    throw;
  }
  count(*allocation, allocation->amounts());
}

// Later counting needs no memory.
void Registry::add_held_row(Tag& tag, int device) {
  if (tag.devices.contains(device)) return;
  held_.push_back({&tag, device, 0});
  try {
    tag.devices.emplace(device, Tag::OnDevice{{}, held_.size() - 1});
  } catch (...) {
    held_.pop_back();
    throw;
  }
}

void Registry::count(Allocation& allocation, const Amounts& now) noexcept {
  Tag::OnDevice& sum = allocation.tag->devices.find(allocation.device)->second;
  sum.amounts -= allocation.counted;
  sum.amounts += now;
  allocation.counted = now;
  held_[sum.held_row].bytes = sum.amounts.device_bytes;
}

void Registry::add_to(Allocation& allocation, int Allocation::* number, int change) {
  const std::lock_guard lock(mutex_);
  allocation.*number = std::max(allocation.*number + change, 0);
  const bool is_counted = number == &Allocation::keep_count && !allocation.is_doomed;
  if (is_counted) count(allocation, allocation.amounts());
}

void Registry::erase_locked(const std::shared_ptr<Allocation>& allocation) {
  by_address_.erase(allocation->address());
  allocation->tag->allocations.erase(allocation->sequence);
  count(*allocation, {});
  if (!allocation->is_held) end_if_on_one_side(*allocation->tag);
}

void Registry::end_if_on_one_side(Tag& tag) noexcept {
  if (!tag.is_partial) return;
  const Amounts sum = tag.total();
  if (sum.away_count == 0 || sum.here_count == 0) tag.is_partial = false;
}

std::shared_ptr<Allocation> Registry::take(CUdeviceptr address, bool* is_ours) {
  const std::lock_guard lock(mutex_);
  const auto found = by_address_.find(address);
  *is_ours = found != by_address_.end() && !found->second->is_doomed;
  if (!*is_ours) return nullptr;
  std::shared_ptr<Allocation> allocation = found->second;
  if (allocation->is_held) {
    allocation->is_doomed = true;
    ahead_steps.note_freed(allocation->tag->ahead_step);
    return nullptr;
  }
  erase_locked(allocation);
  return allocation;
}

// Null as for find().
const std::shared_ptr<Allocation>* Registry::find_locked(CUdeviceptr address) const noexcept {
  const auto after = by_address_.upper_bound(address);
  if (after == by_address_.begin()) return nullptr;
  const auto& allocation = std::prev(after)->second;
  return address - allocation->address() < allocation->size_bytes() && !allocation->is_doomed ? &allocation : nullptr;
}

std::shared_ptr<Allocation> Registry::find(CUdeviceptr address) const {
  const std::lock_guard lock(mutex_);
  const auto* const found = find_locked(address);
  return found == nullptr ? nullptr : *found;
}

namespace {

// Both addresses lie in the range.
bool is_any_chunk_away(const Allocation& allocation, CUdeviceptr first, CUdeviceptr last) {
  return std::any_of(allocation.chunks.begin(), allocation.chunks.end(), [&](const Chunk& chunk) {
    const CUdeviceptr begin = allocation.address() + chunk.offset;
    return begin <= last && first <= begin + (chunk.size_bytes - 1) && !chunk.is_resident();
  });
}

}  // namespace

bool Registry::is_any_byte_away(CUdeviceptr address, size_t size_bytes, bool counts_arriving) const {
  const CUdeviceptr last = address + std::min<CUdeviceptr>(std::max<size_t>(size_bytes, 1) - 1, ~address);
  const std::lock_guard lock(mutex_);
  auto each = by_address_.upper_bound(address);
  if (each != by_address_.begin()) --each;
  for (; each != by_address_.end() && each->first <= last; ++each) {
    const Allocation& allocation = *each->second;
    // In this order: once an allocation is no longer arriving, its places are final.
    if (allocation.is_doomed || (!counts_arriving && allocation.is_arriving.load())) continue;
    if (is_any_chunk_away(allocation, address, last)) return true;
  }
  return false;
}

bool Registry::is_away(CUdeviceptr address, size_t size_bytes) const {
  return is_any_byte_away(address, size_bytes, true);
}

bool Registry::is_missing(CUdeviceptr address, size_t size_bytes) const {
  return is_any_byte_away(address, size_bytes, false);
}

bool Registry::is_any_away(const Tag& tag) const {
  const std::lock_guard lock(mutex_);
  return tag.is_any_away();
}

bool Registry::find_in_handler(CUdeviceptr address, char* tag, size_t capacity, bool* is_away) const noexcept {
  const HandlerSafeMutex::Look look(mutex_);
  if (capacity == 0 || !look.is_granted()) return false;
  const auto* const found = find_locked(address);
  if (found == nullptr) return false;
  const Allocation& allocation = **found;
  const size_t length = std::min(allocation.tag->name.size(), capacity - 1);
  std::memcpy(tag, allocation.tag->name.data(), length);
  tag[length] = '\0';
  *is_away = !allocation.chunk_at(address - allocation.address()).is_resident();
  return true;
}

void Registry::visit_tags(const std::function<void(const Tag&)>& visit) const {
  const std::lock_guard lock(mutex_);
  look(tags_.size());
  for (const auto& [name, tag] : tags_) visit(*tag);
}

bool Registry::visit_tag(const std::string& name, const std::function<void(const Tag&)>& visit,
                         bool is_required) const {
  const std::lock_guard lock(mutex_);
  const auto found = tags_.find(name);
  if (found == tags_.end() && is_required) throw_unknown(name, "");
  if (found == tags_.end()) return false;
  visit(*found->second);
  return true;
}

std::vector<HeldBytes> Registry::held() const {
  const std::lock_guard lock(mutex_);
  std::vector<HeldBytes> rows = held_;
  if (busy_count_ == 0) return rows;
  for (HeldBytes& row : rows) {
    if (!row.tag->is_busy) continue;
    look(row.tag->allocations.size());
    row.bytes = 0;
    for (const auto& [sequence, allocation] : row.tag->allocations)
      row.bytes += allocation->device == row.device ? allocation->device_bytes() : 0;
  }
  return rows;
}

}  // namespace ebbtide
