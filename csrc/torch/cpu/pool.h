// Pools of CPU memory cut as torch's CUDA caching allocator cuts device memory, so that the same questions arise:
// free blocks, leases, fragmentation.
//
// What holds here:
// - Sizes are rounded to 512 bytes. Up to 1 MiB a block comes from a 2 MiB segment, below 10 MiB from a 20 MiB
//   segment, above from a segment of its own, rounded to 2 MiB.
// - A block is found by its address alone, from any thread and at any time. Giving one back takes no memory, calls
//   nobody and touches no byte of the block: its memory may be away.
// - The segment source is called with no lock of ours held.
// - Free blocks are served again only by `allocate` on their own pool. Who calls that only while the pool is open
//   never gets memory that is away.
// - Pools and the arena are made to be leaked: blocks come back after everything else is gone.
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

// Where segments come from. acquire returns null when out of memory; its memory is aligned to 512 bytes at least.
// Both are called from any thread.
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
  FreeList::node_type free_node;  // kept while allocated, so that giving the block back takes no memory
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
  // A pool is open in one place at a time, as torch's are: false where it already is, or where it is not.
  bool open(Pool& pool);
  bool close(Pool& pool);

  // Null when out of memory, after wholly free segments were given back: those of this pool first, then those of all.
  // was_closed, where given: true, and null, where the pool is not open (any more).
  void* allocate(Pool& pool, size_t request_bytes, bool* was_closed = nullptr);
  // False where the address is not in any of our segments. Never throws.
  bool deallocate(void* address) noexcept;
  bool owns(const void* address) noexcept;

  // Gives the wholly free segments of one pool (or, with null, of all) back; returns how many bytes.
  size_t trim(Pool* pool);
  std::vector<SegmentView> snapshot(const Pool& pool);
  // How many segments were looked at for both so far: tests hold its growth.
  uint64_t look_count() const { return look_count_.load(); }

  // Around fork, so that a child never finds the lock held by a thread that it does not have.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  using Segments = std::map<std::byte*, Segment>;

  Segments::iterator find_segment(const void* address);
  void* take_free_block(Pool& pool, size_t size_bytes, bool is_small);
  void* add_segment(Pool& pool, std::byte* memory, size_t segment_bytes, size_t size_bytes, bool is_small);
  void* take_from_source(Pool& pool, size_t segment_bytes);

  SegmentSource& source_;
  std::mutex mutex_;
  Segments segments_;
  std::atomic<uint64_t> look_count_{0};
  std::vector<std::unique_ptr<Pool>> pools_;
};

size_t round_request(size_t request_bytes);
size_t segment_size(size_t block_bytes);

}  // namespace ebbtide::cpu
