#pragma once

#include <cstdint>

// How many threads and slots a copy between device and store uses. Pure.
namespace ebbtide::policy {

inline constexpr uint64_t kSlotBytes = 4ULL << 20;  // larger slots fall out of the cache (FACTS.md, section 2)
inline constexpr int kSlotsPerThread = 2;
inline constexpr int kMaxCopyThreads = 16;

// usable_cores: by affinity and cpu quota. wanted: EBBTIDE_COPY_THREADS, 0 for none. At least 1; no more threads than there are slots' worth of bytes.
int copy_threads(uint64_t bytes, int usable_cores, int wanted);

}  // namespace ebbtide::policy
