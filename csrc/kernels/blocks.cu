// The kernels of blocks.h. After a change: make ptx code-objects.
#include "kernels/digest_steps.h"

using namespace ebbtide::kernels;

namespace {

constexpr uint32_t kWarps = kThreads / 32;
// The words that a thread keeps in flight. With two CTAs on an SM that is 128 KiB, several times what latency requires.
constexpr uint32_t kLoads = 8;
static_assert(kWordsPerChain % kLoads == 0);

// The sum over the CTA, in thread 0.
Digest sum_over_threads(Digest own) {
  __shared__ uint64_t low[kWarps], high[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) {
    own.low += __shfl_down_sync(~0u, own.low, distance);
    own.high += __shfl_down_sync(~0u, own.high, distance);
  }
  if (threadIdx.x % 32 == 0) {
    low[threadIdx.x / 32] = own.low;
    high[threadIdx.x / 32] = own.high;
  }
  __syncthreads();
  Digest sum;
  for (uint32_t warp = 0; threadIdx.x == 0 && warp < kWarps; ++warp) {
    sum.low += low[warp];
    sum.high += high[warp];
  }
  return sum;
}

// What this thread's chain of a section adds to the sum. Sets bits of difference where a word is not the first one.
__device__ Digest digest_section(const ulonglong2* block, uint32_t section, ulonglong2 first, Digest seed,
                                 uint64_t& difference) {
  const ulonglong2* const words_begin = block + section * kWordsPerChain * kThreads + threadIdx.x;
  Chain chain = open_chain(seed, section * kThreads + threadIdx.x);
#pragma unroll 1
  for (uint32_t done = 0; done < kWordsPerChain; done += kLoads) {
    ulonglong2 words[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) words[i] = __ldcs(words_begin + (done + i) * kThreads);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      absorb(chain, words[i].x, words[i].y);
      difference |= (words[i].x ^ first.x) | (words[i].y ^ first.y);
    }
  }
  return close_chain(chain);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2)
    ebbtide_digest_blocks(const uint64_t* addresses, BlockReport* reports, uint64_t seed_low, uint64_t seed_high,
                          uint32_t count) {
  if (blockIdx.x >= count) return;
  // Read once for the CTA: the list may be on the other side of the bus.
  __shared__ uint64_t address;
  if (threadIdx.x == 0) address = addresses[blockIdx.x];
  __syncthreads();

  const ulonglong2* const block = reinterpret_cast<const ulonglong2*>(address);
  const ulonglong2 first = block[0];
  const Digest seed{seed_low, seed_high};
  const bool is_one_section = gridDim.y == kSections;
  const uint32_t begin = is_one_section ? blockIdx.y : 0;
  const uint32_t end = is_one_section ? begin + 1 : kSections;
  uint64_t difference = 0;
  Digest own;
#pragma unroll 1
  for (uint32_t section = begin; section < end; ++section) {
    const Digest added = digest_section(block, section, first, seed, difference);
    own.low += added.low;
    own.high += added.high;
  }

  const bool is_constant = !__syncthreads_or(difference != 0);
  const Digest sum = sum_over_threads(own);
  if (threadIdx.x == 0)
    reports[blockIdx.x * gridDim.y + blockIdx.y] = {
        is_one_section ? sum : seal(sum, seed), {first.x, first.y}, is_constant, 0};
}

extern "C" __global__ void __launch_bounds__(kThreads) ebbtide_fill_blocks(const BlockFill* fills, uint32_t count) {
  if (blockIdx.x >= count) return;
  __shared__ uint64_t address, low, high;
  if (threadIdx.x == 0) {
    address = fills[blockIdx.x].address;
    low = fills[blockIdx.x].value.low;
    high = fills[blockIdx.x].value.high;
  }
  __syncthreads();

  ulonglong2* const block = reinterpret_cast<ulonglong2*>(address);
  const ulonglong2 word = make_ulonglong2(low, high);
#pragma unroll 8
  for (uint32_t i = 0; i < kWordsPerThread; ++i) __stcs(block + i * kThreads + threadIdx.x, word);
}

namespace {

// As the device has it on the other side of the bus now, and not as it was when somebody last looked.
#ifdef __HIP__
__device__ uint32_t look(const uint32_t* word) {
  return __hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ void tell(uint32_t* word, uint32_t value) {
  __hip_atomic_store(word, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
#else
__device__ uint32_t look(const uint32_t* word) { return *const_cast<const volatile uint32_t*>(word); }
__device__ void tell(uint32_t* word, uint32_t value) { *const_cast<volatile uint32_t*>(word) = value; }
#endif

// Where the bytes of a piece are; 0 when the delivery is given up. Waits for the slot that they come through.
__device__ uint64_t await_source(const Piece& piece, const char* lane_slots_begin, const uint32_t* board,
                                 const uint32_t* lane, uint64_t slot_bytes, uint32_t slot, uint32_t number) {
  bool is_given_up = look(board) != 0;
  if (piece.source != kFromSlot) return is_given_up ? 0 : piece.source;
  while (!is_given_up && look(lane + kFirstFilled + slot) != number) is_given_up = look(board) != 0;
  // What was written before the word is seen after it.
  __threadfence_system();
  return is_given_up ? 0 : reinterpret_cast<uint64_t>(lane_slots_begin) + slot * slot_bytes;
}

__device__ void copy_piece(uint64_t target, uint64_t source, uint64_t size_bytes) {
  ulonglong2* const to = reinterpret_cast<ulonglong2*>(target);
  const ulonglong2* const from = reinterpret_cast<const ulonglong2*>(source);
#pragma unroll 1
  for (uint64_t done = threadIdx.x; done < size_bytes / 16; done += kLoads * kThreads) {
    ulonglong2 words[kLoads];
    // Never from a cache: the slot held other bytes before.
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) words[i] = __ldcv(from + done + i * kThreads);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) to[done + i * kThreads] = words[i];
  }
}

__device__ void write_value(uint64_t target, ulonglong2 value, uint64_t size_bytes) {
  ulonglong2* const to = reinterpret_cast<ulonglong2*>(target);
#pragma unroll 8
  for (uint64_t done = threadIdx.x; done < size_bytes / 16; done += kThreads) to[done] = value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    ebbtide_deliver(const Piece* pieces, const char* slots, uint32_t* board, uint64_t slot_bytes, uint32_t lane_slots,
                    uint32_t count) {
  if (count == 0) return;
  __shared__ uint64_t target, source, size_bytes, low, high;
  uint32_t* const lane = board + kLaneWords * (1 + blockIdx.x);
  const char* const own_slots = slots + blockIdx.x * lane_slots * slot_bytes;
  const uint32_t base = look(lane + kBase);
  uint32_t number = 0;
  for (uint32_t index = blockIdx.x; index < count; index += kLanes) {
    const uint32_t slot = number++ % lane_slots;
    if (threadIdx.x == 0) {
      const Piece& piece = pieces[index];
      source = await_source(piece, own_slots, board, lane, slot_bytes, slot, number);
      target = piece.target;
      size_bytes = piece.size_bytes;
      low = piece.value.low;
      high = piece.value.high;
    }
    __syncthreads();
    if (source == 0) break;
    if (source == kFromValue) {
      write_value(target, make_ulonglong2(low, high), size_bytes);
    } else {
      copy_piece(target, source, size_bytes);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      // Whoever sees the words sees the bytes.
      __threadfence_system();
      tell(lane + kDone, number);
      tell(lane + kGate, base + number);
    }
  }
  if (threadIdx.x == 0) {
    __threadfence_system();
    tell(lane + kGate, base + (count + kLanes - 1 - blockIdx.x) / kLanes);
  }
}
