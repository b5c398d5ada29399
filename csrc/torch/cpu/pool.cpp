#include "torch/cpu/pool.h"

#include <functional>
#include <iterator>
#include <new>
#include <utility>

namespace ebbtide::cpu {

namespace {

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The rest of a block becomes a block of its own if it is large enough: 512 bytes in a small segment, more than 1 MiB
// in a large one.
bool is_worth_splitting(size_t rest_bytes, bool is_small) {
  return is_small ? rest_bytes >= kMinBlockBytes : rest_bytes > kSmallRequestBytes;
}

FreeList::node_type make_node(Block* block) {
  FreeList scratch;
  return scratch.extract(scratch.insert(block).first);
}

void insert_free(FreeList& list, Block& block) noexcept {
  block.is_allocated = false;
  list.insert(std::move(block.free_node));
}

// Cuts a block that is not free to size_bytes, if the rest is large enough: it becomes a free block of the list.
void cut(Segment& segment, FreeList& list, Block& block, size_t size_bytes) {
  const size_t rest_bytes = block.size_bytes - size_bytes;
  if (!is_worth_splitting(rest_bytes, segment.is_small)) return;
  std::byte* rest_address = block.address + size_bytes;
  const auto rest = segment.blocks.emplace(rest_address, Block{rest_address, rest_bytes, false, {}}).first;
  try {
    list.insert(&rest->second);
  } catch (...) {
    segment.blocks.erase(rest);
    throw;
  }
  block.size_bytes = size_bytes;
}

}  // namespace

bool BySizeThenAddress::operator()(const Block* left, const Block* right) const {
  if (left->size_bytes != right->size_bytes) return left->size_bytes < right->size_bytes;
  return std::less<const std::byte*>()(left->address, right->address);
}

size_t round_request(size_t request_bytes) {
  return request_bytes == 0 ? kMinBlockBytes : round_up(request_bytes, kMinBlockBytes);
}

size_t segment_size(size_t block_bytes) {
  if (block_bytes <= kSmallRequestBytes) return kSmallSegmentBytes;
  if (block_bytes < kLargeRequestBytes) return kLargeSegmentBytes;
  return round_up(block_bytes, kSegmentRoundBytes);
}

size_t least_segment_size(size_t block_bytes) { return round_up(block_bytes, kSegmentRoundBytes); }

Pool& Arena::make_pool(int32_t slot, std::string tag) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto pool = std::make_unique<Pool>();
  pool->id = static_cast<int64_t>(pools_.size()) + 1;
  pool->slot = slot;
  pool->tag = std::move(tag);
  pools_.push_back(std::move(pool));
  return *pools_.back();
}

Pool* Arena::find_pool(int64_t id) {
  std::lock_guard<std::mutex> guard(mutex_);
  return id >= 1 && static_cast<uint64_t>(id) <= pools_.size() ? pools_[static_cast<size_t>(id) - 1].get() : nullptr;
}

bool Arena::open(Pool& pool) {
  std::lock_guard<std::mutex> guard(mutex_);
  return !std::exchange(pool.is_open, true);
}

bool Arena::close(Pool& pool) {
  std::lock_guard<std::mutex> guard(mutex_);
  return std::exchange(pool.is_open, false);
}

void* Arena::allocate(Pool& pool, size_t request_bytes, bool* was_closed, bool takes_least) {
  // Checked under the lock: another thread that closes the pool may pause its memory next.
  const auto is_refused = [&] { return was_closed != nullptr && (*was_closed = !pool.is_open); };
  if (request_bytes > kMaxRequestBytes) return nullptr;
  const size_t size_bytes = round_request(request_bytes);
  const bool is_small = size_bytes <= kSmallRequestBytes;
  const size_t segment_bytes = takes_least ? least_segment_size(size_bytes) : segment_size(size_bytes);
  try {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      if (is_refused()) return nullptr;
      if (void* address = take_free_block(pool, size_bytes, is_small)) return address;
    }
    void* memory = take_from_source(pool, segment_bytes);
    if (memory == nullptr) return nullptr;
    try {
      std::unique_lock<std::mutex> guard(mutex_);
      if (is_refused()) {
        guard.unlock();
        source_.release(memory);
        return nullptr;
      }
      return add_segment(pool, static_cast<std::byte*>(memory), segment_bytes, size_bytes, is_small);
    } catch (...) {
      source_.release(memory);
      throw;
    }
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void* Arena::take_from_source(Pool& pool, size_t segment_bytes) {
  void* memory = source_.acquire(pool.slot, segment_bytes);
  if (memory != nullptr) return memory;
  // As torch does, whether or not the trim releases anything: a source may refuse the first call and serve the second.
  if (trim(&pool) == 0) trim(nullptr);
  memory = source_.acquire(pool.slot, segment_bytes);
  if (memory == nullptr && trim(nullptr) > 0) memory = source_.acquire(pool.slot, segment_bytes);
  return memory;
}

void* Arena::serve(Block& block) {
  block.is_allocated = true;
  used_bytes_ += block.size_bytes;
  return block.address;
}

void* Arena::take_free_block(Pool& pool, size_t size_bytes, bool is_small) {
  FreeList& list = pool.free_list(is_small);
  Block least{nullptr, size_bytes, false, {}};
  const auto found = list.lower_bound(&least);
  if (found == list.end()) return nullptr;
  Block& block = **found;
  block.free_node = list.extract(found);
  try {
    cut(find_segment(block.address)->second, list, block, size_bytes);
  } catch (...) {
    insert_free(list, block);
    throw;
  }
  return serve(block);
}

void* Arena::add_segment(Pool& pool, std::byte* memory, size_t segment_bytes, size_t size_bytes, bool is_small) {
  const auto segment = segments_.emplace(memory, Segment{&pool, segment_bytes, is_small, {}}).first;
  try {
    pool.segments.insert(memory);
    Block& block = segment->second.blocks.emplace(memory, Block{memory, segment_bytes, true, {}}).first->second;
    block.free_node = make_node(&block);
    cut(segment->second, pool.free_list(is_small), block, size_bytes);
    return serve(block);
  } catch (...) {
    pool.segments.erase(memory);
    segments_.erase(segment);
    throw;
  }
}

Arena::Segments::iterator Arena::find_segment(const void* address) {
  auto* byte = const_cast<std::byte*>(static_cast<const std::byte*>(address));
  auto after = segments_.upper_bound(byte);
  if (after == segments_.begin()) return segments_.end();
  const auto segment = std::prev(after);
  return byte < segment->first + segment->second.size_bytes ? segment : segments_.end();
}

bool Arena::owns(const void* address) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  return find_segment(address) != segments_.end();
}

bool Arena::deallocate(void* address) noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  const auto segment = find_segment(address);
  if (segment == segments_.end()) return false;
  auto& blocks = segment->second.blocks;
  auto block = blocks.find(static_cast<std::byte*>(address));
  if (block == blocks.end() || !block->second.is_allocated) return true;  // a second free of a block: nothing changes
  FreeList& list = segment->second.pool->free_list(segment->second.is_small);
  used_bytes_ -= block->second.size_bytes;

  const auto after = std::next(block);
  if (after != blocks.end() && !after->second.is_allocated) {
    list.extract(&after->second);
    block->second.size_bytes += after->second.size_bytes;
    blocks.erase(after);
  }
  if (block != blocks.begin() && !std::prev(block)->second.is_allocated) {
    const auto before = std::prev(block);
    before->second.free_node = list.extract(&before->second);
    before->second.size_bytes += block->second.size_bytes;
    blocks.erase(block);
    block = before;
  }
  insert_free(list, block->second);
  return true;
}

size_t Arena::trim(Pool* pool) {
  Segments trimmed;
  const auto trim_if_free = [&](Segments::iterator current) {
    ++look_count_;
    Segment& segment = current->second;
    Block& first = segment.blocks.begin()->second;
    if (first.is_allocated || first.size_bytes != segment.size_bytes) return;
    segment.pool->free_list(segment.is_small).extract(&first);
    segment.pool->segments.erase(current->first);
    trimmed.insert(segments_.extract(current));
  };
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (pool == nullptr) {
      for (auto next = segments_.begin(); next != segments_.end();) trim_if_free(next++);
    } else {
      for (auto next = pool->segments.begin(); next != pool->segments.end();) trim_if_free(segments_.find(*next++));
    }
  }
  size_t bytes = 0;
  for (const auto& [address, segment] : trimmed) {
    source_.release(address);
    bytes += segment.size_bytes;
  }
  return bytes;
}

std::vector<SegmentView> Arena::snapshot(const Pool& pool) {
  std::vector<SegmentView> views;
  std::lock_guard<std::mutex> guard(mutex_);
  for (std::byte* const address : pool.segments) {
    ++look_count_;
    const Segment& segment = segments_.at(address);
    SegmentView view{address, segment.size_bytes, {}};
    for (const auto& [block_address, block] : segment.blocks) {
      view.blocks.push_back({static_cast<size_t>(block_address - address), block.size_bytes, block.is_allocated});
    }
    views.push_back(std::move(view));
  }
  return views;
}

}  // namespace ebbtide::cpu
