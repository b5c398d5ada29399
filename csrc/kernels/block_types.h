#pragma once

// What blocks.cu and the rest share: NVRTC, which has no standard headers, compiles this as well as the C++ compiler does.
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
// Threads that share one block on the GPU, and chains that the digest of one has: the two are one number.
inline constexpr uint32_t kThreads = 512;
inline constexpr uint32_t kWordsPerThread = kBlockBytes / 16 / kThreads;

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

struct BlockReport {
  Digest digest;
  Value value;               // the first 16 bytes
  uint32_t is_constant = 0;  // 1 where all the others are equal to them
  uint32_t reserved = 0;
  friend bool operator==(const BlockReport&, const BlockReport&) = default;
};

struct BlockFill {
  uint64_t address = 0;
  Value value;
};

// The kernels and the CPU have to agree on these.
static_assert(sizeof(BlockReport) == 40 && sizeof(BlockFill) == 24);

}  // namespace ebbtide::kernels
