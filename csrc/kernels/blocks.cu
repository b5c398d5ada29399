// The kernels of blocks.h. After a change: make ptx.
#include "kernels/digest_steps.h"

using namespace ebbtide::kernels;

namespace {

constexpr uint32_t kWarps = kThreads / 32;
// Words of a thread that are on their way at once: with two CTAs on an SM, 128 KiB, which is several times what latency asks for.
constexpr uint32_t kLoads = 8;
static_assert(kWordsPerThread % kLoads == 0);

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
  Chain chain = open_chain(seed, threadIdx.x);
  uint64_t difference = 0;
  for (uint32_t done = 0; done < kWordsPerThread; done += kLoads) {
    ulonglong2 words[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) words[i] = __ldcs(block + (done + i) * kThreads + threadIdx.x);
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      absorb(chain, words[i].x, words[i].y);
      difference |= (words[i].x ^ first.x) | (words[i].y ^ first.y);
    }
  }

  const bool is_constant = !__syncthreads_or(difference != 0);
  const Digest sum = sum_over_threads(close_chain(chain));
  if (threadIdx.x == 0) reports[blockIdx.x] = {seal(sum, seed), {first.x, first.y}, is_constant, 0};
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
