#pragma once

#include "kernels/block_types.h"

// The digest of a block. The GPU (blocks.cu) and the CPU (blocks.cpp) run these same lines.
//
// A section of a block is kThreads chains. Chain t absorbs the 16-byte words t, t + kThreads, t + 2 kThreads, ... of
// the section and ends in 128 bits. The digest is the sum of these over all sections, sealed.
// - A change within one word always changes the digest. absorb() is one to one in the word for a given state, and in
//   the state for a given word (xor, addition, rotation and odd factors can all be undone). So the chain's state
//   changes, and equal words that follow do not undo the change. close_chain() and seal() are one to one too, and only
//   one term of the sum differs.
// - Changes of several words cancel only by accident. After each word, both halves of the state have been multiplied
//   and mixed into each other, so the word that would cancel an earlier change looks random. The odds for two contents
//   are about 2^-128. This is an estimate, not a proof, and it does not hold for an adversary: knowing the seed, one
//   can construct collisions.
// - Position counts: chains start from the seed and their own number, and the order within a chain matters since its
//   state is multiplied between words.
// - Sums may be taken in any order, so neither the GPU's reduction nor the number of CTAs affects the result.
namespace ebbtide::kernels {

struct Chain {
  uint64_t a;
  uint64_t b;
};

namespace steps {

// Odd constants with about as many ones as zeros and no pattern: 2^64 divided by the golden ratio, and the leading
// digits of square roots of primes.
inline constexpr uint64_t kGolden = 0x9e3779b97f4a7c15;
inline constexpr uint64_t kFactorX = 0x6a09e667f3bcc909;
inline constexpr uint64_t kFactorA = 0xbb67ae8584caa73b;
inline constexpr uint64_t kFactorY = 0x3c6ef372fe94f82b;
inline constexpr uint64_t kFactorB = 0xa54ff53a5f1d36f1;

inline uint64_t rotate_left(uint64_t value, int count) { return (value << count) | (value >> (64 - count)); }

// One to one; every bit of the result depends on every bit of the value.
inline uint64_t scramble(uint64_t value) {
  value = (value ^ (value >> 32)) * kFactorA;
  value = (value ^ (value >> 29)) * kFactorB;
  return value ^ (value >> 32);
}

}  // namespace steps

inline Chain open_chain(Digest seed, uint32_t number) {
  const uint64_t step = steps::kGolden * (number + uint64_t{1});
  const uint64_t a = steps::scramble(seed.low + step);
  return {a, steps::scramble((seed.high ^ a) + step)};
}

inline void absorb(Chain& chain, uint64_t x, uint64_t y) {
  chain.a = steps::rotate_left(chain.a ^ (x * steps::kFactorX), 31) * steps::kFactorA + chain.b;
  chain.b = steps::rotate_left(chain.b ^ (y * steps::kFactorY), 29) * steps::kFactorB + chain.a;
}

// What a chain adds to the sum.
inline Digest close_chain(Chain chain) {
  chain.a = steps::scramble(chain.a + chain.b);
  chain.b = steps::scramble(chain.b ^ chain.a);
  chain.a += steps::scramble(chain.b + steps::kGolden);
  return {chain.a, chain.b};
}

inline Digest seal(Digest sum, Digest seed) { return close_chain({sum.low ^ seed.low, sum.high + seed.high}); }

}  // namespace ebbtide::kernels
