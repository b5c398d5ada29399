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

BlockReport digest_section(const std::byte* block, uint32_t section, Digest seed) {
  constexpr size_t kWords = kBlockBytes / sizeof(Value) / kSections;
  Chain chains[kThreads];
  for (uint32_t thread = 0; thread < kThreads; ++thread) chains[thread] = open_chain(seed, section * kThreads + thread);
  const Value first = word_at(block, 0);
  uint64_t difference = 0;
  // In memory order, not chain by chain: the result is the same, and the cache is used better.
  for (size_t index = 0; index < kWords; ++index) {
    const Value word = word_at(block, section * kWords + index);
    absorb(chains[index % kThreads], word.low, word.high);
    difference |= (word.low ^ first.low) | (word.high ^ first.high);
  }
  Digest sum;
  for (const Chain& chain : chains) {
    const Digest term = close_chain(chain);
    sum.low += term.low;
    sum.high += term.high;
  }
  return {sum, first, difference == 0 ? 1U : 0U, 0};
}

BlockReport join_sections(const BlockReport* sections, Digest seed) {
  BlockReport report{{}, sections[0].value, 1, 0};
  for (uint32_t section = 0; section < kSections; ++section) {
    report.digest.low += sections[section].digest.low;
    report.digest.high += sections[section].digest.high;
    report.is_constant &= sections[section].is_constant;
  }
  report.digest = seal(report.digest, seed);
  return report;
}

BlockReport digest_block(const std::byte* block, Digest seed) {
  BlockReport sections[kSections];
  for (uint32_t section = 0; section < kSections; ++section) sections[section] = digest_section(block, section, seed);
  return join_sections(sections, seed);
}

void fill_block(std::byte* block, Value value) {
  for (size_t done = 0; done < kBlockBytes; done += sizeof value) std::memcpy(block + done, &value, sizeof value);
}

}  // namespace ebbtide::kernels
