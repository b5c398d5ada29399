#include "policy/slab_space.h"

#include <iterator>

namespace ebbtide::policy {

void SlabSpace::add(uint64_t slab, uint64_t size_bytes) {
  slabs_.emplace(slab, size_bytes);
  try {
    ranges_.emplace(slab, Range{size_bytes, slab, State::kFree, {}});
    free_.emplace(size_bytes, slab);
  } catch (...) {
    ranges_.erase(slab);
    slabs_.erase(slab);
    throw;
  }
  held_bytes_ += size_bytes;
}

std::optional<uint64_t> SlabSpace::take(uint64_t size_bytes) {
  const auto best = free_.lower_bound({size_bytes, 0});
  if (best == free_.end()) return std::nullopt;
  const auto [range_bytes, address] = *best;
  Range& range = ranges_.at(address);
  if (const uint64_t rest_bytes = range_bytes - size_bytes; rest_bytes > 0) {
    const uint64_t rest = address + size_bytes;
    ranges_.emplace(rest, Range{rest_bytes, range.slab, State::kFree, {}});
    try {
      free_.emplace(rest_bytes, rest);
    } catch (...) {
      ranges_.erase(rest);
      throw;
    }
  }
  range.size_bytes = size_bytes;
  range.state = State::kTaken;
  range.entry = free_.extract(best);
  used_bytes_ += size_bytes;
  return address;
}

bool SlabSpace::give_back(uint64_t piece) noexcept {
  const auto found = ranges_.find(piece);
  if (found == ranges_.end()) return false;
  if (found->second.state == State::kKept) {
    found->second.state = State::kKeptAndGivenBack;
    return true;
  }
  if (found->second.state != State::kTaken) return false;
  make_free(found);
  return true;
}

// Together with the free ranges before and after it in the same slab. Ranges of two slabs never become one: each slab
// goes back to the system by itself, and no copy may cross from one to the next.
void SlabSpace::make_free(Ranges::iterator range) noexcept {
  used_bytes_ -= range->second.size_bytes;
  const auto is_joined = [&](Ranges::iterator neighbour) {
    return neighbour->second.state == State::kFree && neighbour->second.slab == range->second.slab;
  };
  const auto drop = [&](Ranges::iterator merged) {
    free_.erase({merged->second.size_bytes, merged->first});
    ranges_.erase(merged);
  };
  FreeRanges::node_type entry = std::move(range->second.entry);
  if (const auto next = std::next(range); next != ranges_.end() && is_joined(next)) {
    range->second.size_bytes += next->second.size_bytes;
    drop(next);
  }
  if (range != ranges_.begin() && is_joined(std::prev(range))) {
    const auto before = std::prev(range);
    free_.erase({before->second.size_bytes, before->first});
    before->second.size_bytes += range->second.size_bytes;
    ranges_.erase(range);
    range = before;
  }
  range->second.state = State::kFree;
  entry.value() = {range->second.size_bytes, range->first};
  free_.insert(std::move(entry));
}

bool SlabSpace::keep_for_good(uint64_t address) noexcept {
  auto found = ranges_.upper_bound(address);
  if (found == ranges_.begin()) return false;
  --found;
  if (address - found->first >= found->second.size_bytes) return false;
  if (found->second.state == State::kFree) return false;
  if (found->second.state == State::kTaken) found->second.state = State::kKept;
  return true;
}

std::optional<uint64_t> SlabSpace::find_free_slab() const noexcept {
  for (const auto& [slab, size_bytes] : slabs_) {
    const auto first = ranges_.find(slab);
    if (first->second.state == State::kFree && first->second.size_bytes == size_bytes) return slab;
  }
  return std::nullopt;
}

void SlabSpace::remove(uint64_t slab) noexcept {
  const auto found = slabs_.find(slab);
  held_bytes_ -= found->second;
  free_.erase({found->second, slab});
  ranges_.erase(slab);
  slabs_.erase(found);
}

}  // namespace ebbtide::policy
