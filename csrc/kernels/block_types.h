#pragma once

// The types that blocks.cu shares with the C++ code. NVRTC, which has no standard headers, compiles this file too.
#ifdef __CUDACC_RTC__
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#else
#include <cstddef>
#include <cstdint>
#endif

namespace ebbtide::kernels {

// Every chunk is a multiple of it.
inline constexpr size_t kBlockBytes = 2 << 20;
inline constexpr uint32_t kThreads = 512;  // of a CTA
inline constexpr uint32_t kWordsPerThread = kBlockBytes / 16 / kThreads;
// A block's digest is made of kSections sections, one after the other in memory, each with a chain for every thread. A
// few blocks are digested by a CTA for each section, many by a CTA for each block.
inline constexpr uint32_t kSections = 8;
inline constexpr uint32_t kWordsPerChain = kWordsPerThread / kSections;

struct Digest {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Digest&, const Digest&) = default;
};

// 16 bytes as they lie in memory: the word that a block begins with, or is to be filled with.
struct Value {
  uint64_t low = 0;
  uint64_t high = 0;
  friend bool operator==(const Value&, const Value&) = default;
};

// Of a block, or of one section: then digest is what its chains add to the sum, and is_constant is about its words.
struct BlockReport {
  Digest digest;
  Value value;               // the first 16 bytes of the block
  uint32_t is_constant = 0;  // 1 where all the others are equal to them
  uint32_t reserved = 0;
  friend bool operator==(const BlockReport&, const BlockReport&) = default;
};

struct BlockFill {
  uint64_t address = 0;
  Value value;
};

// One piece of a delivery, which a kernel brings to the device: bytes of host memory, or one value over and over.
struct Piece {
  uint64_t target = 0;
  uint64_t source = 0;  // host memory that the device reaches; kFromSlot or kFromValue
  uint64_t size_bytes = 0;
  uint64_t reserved = 0;
  Value value;
};
inline constexpr uint64_t kFromSlot = 0;   // of the ring: somebody fills it in time
inline constexpr uint64_t kFromValue = 1;  // no bytes at all
// Every piece is a multiple of it, and aligned to 16 bytes.
inline constexpr uint64_t kPieceUnit = 64 << 10;

// The number of CTAs that a delivery's pieces are dealt to in turn: piece i is number i / kLanes of lane i % kLanes.
// Together they keep 512 KiB in flight, several times what the latency of the bus requires.
inline constexpr uint32_t kLanes = 8;
inline constexpr uint32_t kMaxLaneSlots = 16;

// The words through which threads, kernel and waiting streams communicate. Word 0 of the board is not zero once the
// delivery is cancelled. The lanes follow, a cache line each.
inline constexpr uint32_t kLaneWords = 32;
enum LaneWord : uint32_t {
  kGate = 0,  // kBase and the pieces in place; at the kernel's end, however it came, kBase and all: streams wait for it
  kDone = 1,  // the pieces in place
  kBase = 2,  // what the gate began with
  kFirstFilled = 4  // for each slot: which of the lane's pieces it holds, counted from 1
};
inline constexpr uint32_t kBoardWords = kLaneWords * (1 + kLanes);
static_assert(kFirstFilled + kMaxLaneSlots <= kLaneWords);

// The kernels and the CPU have to agree on these.
static_assert(sizeof(BlockReport) == 40 && sizeof(BlockFill) == 24 && sizeof(Piece) == 48);

}  // namespace ebbtide::kernels
