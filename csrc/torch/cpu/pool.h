// Pools of CPU memory. They are cut as torch's CUDA caching allocator cuts device memory, so that the same questions
// arise: free blocks, leases, fragmentation.
//
// Rules:
// - Sizes are rounded up to 512 bytes. A block of up to 1 MiB comes from a segment of 2 MiB, a block below 10 MiB from
//   a segment of 20 MiB, and a larger one from a segment of its own, rounded up to 2 MiB.
// - A block is found by its address alone, from any thread and at any time. Returning one allocates no memory, calls no
//   other component, and touches no byte of the block, because the block may be paused.
// - The segment source is called while no lock of ours is held.
// - Only `allocate` on their own pool hands out free blocks again. A caller that uses it only while the pool is open
//   never gets paused memory.
// - Pools and the arena are leaked, because blocks are returned after everything else has been destroyed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace ebbtide::cpu {

inline constexpr size_t kMinBlockBytes = 512;
inline constexpr size_t kSmallRequestBytes = size_t{1} << 20;
inline constexpr size_t kSmallSegmentBytes = size_t{2} << 20;
inline constexpr size_t kLargeRequestBytes = size_t{10} << 20;
inline constexpr size_t kLargeSegmentBytes = size_t{20} << 20;
inline constexpr size_t kSegmentRoundBytes = size_t{2} << 20;
inline constexpr size_t kMaxRequestBytes = size_t{1} << 47;

// The source of segments. acquire returns null when out of memory; its memory is aligned to at least 512 bytes. Both
// functions are called from any thread.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  virtual void* acquire(int32_t slot, size_t size_bytes) noexcept = 0;
  virtual void release(void* address) noexcept = 0;
};

struct Block;
struct BySizeThenAddress {
  bool operator()(const Block* left, const Block* right) const;
};
using FreeList = std::set<Block*, BySizeThenAddress>;

struct Pool;
struct Segment {
  Pool* pool;
  size_t size_bytes;
  bool is_small;
  std::map<std::byte*, Block> blocks;  // they tile the segment
};

struct Block {
  std::byte* address;
  size_t size_bytes;
  bool is_allocated;
  FreeList::node_type free_node;  // kept while allocated, so that returning the block allocates nothing
};

struct Pool {
  int64_t id;
  int32_t slot;
  std::string tag;  // for messages; may be empty
  bool is_open = false;
  FreeList small_free, large_free;
  std::set<std::byte*> segments;  // where they begin

  FreeList& free_list(bool is_small) { return is_small ? small_free : large_free; }
};

struct BlockView {
  size_t offset_bytes, size_bytes;
  bool is_allocated;
};
struct SegmentView {
  void* address;
  size_t size_bytes;
  std::vector<BlockView> blocks;
};

class Arena {
 public:
  explicit Arena(SegmentSource& source) : source_(source) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  Pool& make_pool(int32_t slot, std::string tag);
  Pool* find_pool(int64_t id);  // null where there is none
  // A pool is open in one place at a time, as torch's pools are. False if it is already open, or if it is not open.
  bool open(Pool& pool);
  bool close(Pool& pool);

  // Null when out of memory, after wholly free segments were released: first those of this pool, then those of all
  // pools. If was_closed is given, a pool that is not open (any more) sets it to true and gets null.
  // takes_least: a new segment is no larger than the block needs, for when one of the usual size does not fit.
  void* allocate(Pool& pool, size_t request_bytes, bool* was_closed = nullptr, bool takes_least = false);
  // False if the address is in none of our segments. Never throws.
  bool deallocate(void* address) noexcept;
  bool owns(const void* address) noexcept;

  // Releases the wholly free segments of one pool, or of all pools for null. Returns their bytes.
  size_t trim(Pool* pool);
  std::vector<SegmentView> snapshot(const Pool& pool);
  // In blocks that are allocated, of all pools.
  uint64_t used_bytes() const { return used_bytes_.load(); }
  // How many segments `trim` and `snapshot` have examined so far. Tests bound its growth.
  uint64_t look_count() const { return look_count_.load(); }

  // Held around a fork, so that a child never finds the lock held by a thread that it does not have.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using Segments = std::map<std::byte*, Segment>;

  Segments::iterator find_segment(const void* address);
  void* serve(Block& block);
  void* take_free_block(Pool& pool, size_t size_bytes, bool is_small);
  void* add_segment(Pool& pool, std::byte* memory, size_t segment_bytes, size_t size_bytes, bool is_small);
  void* take_from_source(Pool& pool, size_t segment_bytes);

  SegmentSource& source_;
  std::mutex mutex_;
  Segments segments_;
  std::atomic<uint64_t> used_bytes_{0};
  std::atomic<uint64_t> look_count_{0};
  std::vector<std::unique_ptr<Pool>> pools_;
};

size_t round_request(size_t request_bytes);
size_t segment_size(size_t block_bytes);
size_t least_segment_size(size_t block_bytes);

}  // namespace ebbtide::cpu
