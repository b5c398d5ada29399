#include "kernels/blocks.h"

#include <cstring>

#include "kernels/digest_steps.h"

namespace ebbtide::kernels {
namespace {

Value word_at(const std::byte* block, size_t index) {
  Value word;
  std::memcpy(&word, block + index * sizeof word, sizeof word);
  return word;
}

}  // namespace

BlockReport digest_block(const std::byte* block, Digest seed) {
  Chain chains[kThreads];
  for (uint32_t number = 0; number < kThreads; ++number) chains[number] = open_chain(seed, number);
  const Value first = word_at(block, 0);
  uint64_t difference = 0;
  // In memory order, not chain by chain: the result is the same, and the cache is used better.
  for (size_t index = 0; index < kBlockBytes / sizeof(Value); ++index) {
    const Value word = word_at(block, index);
    absorb(chains[index % kThreads], word.low, word.high);
    difference |= (word.low ^ first.low) | (word.high ^ first.high);
  }
  Digest sum;
  for (const Chain& chain : chains) {
    const Digest term = close_chain(chain);
    sum.low += term.low;
    sum.high += term.high;
  }
  return {seal(sum, seed), first, difference == 0 ? 1U : 0U, 0};
}

void fill_block(std::byte* block, Value value) {
  for (size_t done = 0; done < kBlockBytes; done += sizeof value) std::memcpy(block + done, &value, sizeof value);
}

}  // namespace ebbtide::kernels
