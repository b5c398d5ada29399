// The digest of a block on the CPU: it detects the changes that it must detect, and depends on the content and the seed
// only.
#include "kernels/blocks.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace ebbtide::kernels {
namespace {

constexpr Digest kSeed{0x0123456789abcdef, 0xfedcba9876543210};
constexpr size_t kWords = kBlockBytes / sizeof(Value);

struct BlockTest : ::testing::Test {
  // Every word differs from every other.
  void SetUp() override {
    for (uint64_t word = 0; word < kWords; ++word) set_word(word, {word * 0x9e3779b97f4a7c15, ~word});
  }
  BlockReport report(Digest seed = kSeed) const { return digest_block(block.data(), seed); }
  Digest digest() const { return report().digest; }
  void fill(Value value) { fill_block(block.data(), value); }
  Value word(size_t index) const {
    Value value;
    std::memcpy(&value, block.data() + index * sizeof value, sizeof value);
    return value;
  }
  void set_word(size_t index, Value value) { std::memcpy(block.data() + index * sizeof value, &value, sizeof value); }
  void flip(size_t byte, int bit) { block[byte] ^= std::byte{1} << bit; }

  std::vector<std::byte> block = std::vector<std::byte>(kBlockBytes);
};

constexpr size_t kSectionWords = kWords / kSections;

// The first and the last word of the block, of a section, of the first and the last thread, and of an unrolled run of
// loads, and some in between.
const size_t kPositions[] = {0,
                             1,
                             15,
                             16,
                             31,
                             511,
                             512,
                             513,
                             4095,
                             4096,
                             kWords / 2,
                             kWords / 3,
                             kWords - 513,
                             kWords - 512,
                             kWords - 511,
                             kWords - 2,
                             kWords - 1,
                             kSectionWords - 1,
                             kSectionWords};

TEST_F(BlockTest, EveryBitOfAWordCountsWhereverTheWordStands) {
  std::set<std::pair<uint64_t, uint64_t>> seen{{digest().low, digest().high}};
  for (const size_t position : kPositions) {
    for (int bit = 0; bit < 128; bit += position == 0 || position == kWords - 1 ? 1 : 13) {
      const size_t byte = position * sizeof(Value) + static_cast<size_t>(bit / 8);
      flip(byte, bit % 8);
      EXPECT_TRUE(seen.insert({digest().low, digest().high}).second) << "word " << position << ", bit " << bit;
      flip(byte, bit % 8);
    }
  }
  EXPECT_TRUE(seen.contains({digest().low, digest().high})) << "and back again";
}

TEST_F(BlockTest, BothHalvesOfTheDigestChange) {
  const Digest before = digest();
  for (const size_t position : kPositions) {
    flip(position * sizeof(Value) + 15, 7);
    EXPECT_NE(digest().low, before.low) << position;
    EXPECT_NE(digest().high, before.high) << position;
    flip(position * sizeof(Value) + 15, 7);
  }
}

TEST_F(BlockTest, AChangeSpreadsOverHalfOfTheDigest) {
  const Digest before = digest();
  int changed = 0, tries = 0;
  for (const size_t position : kPositions) {
    flip(position * sizeof(Value), static_cast<int>(position % 8));
    const Digest after = digest();
    changed += __builtin_popcountll(before.low ^ after.low) + __builtin_popcountll(before.high ^ after.high);
    flip(position * sizeof(Value), static_cast<int>(position % 8));
    ++tries;
  }
  // 19 draws of 128 fair coins: 64 each, with a deviation of 1.4 for their mean.
  EXPECT_NEAR(changed / static_cast<double>(tries), 64.0, 8.0);
}

TEST_F(BlockTest, WordsThatChangePlacesAreNoticed) {
  const Digest before = digest();
  // In one chain, in neighbouring chains, in the same step of two chains, far apart.
  const std::pair<size_t, size_t> swaps[] = {
      {0, 512}, {0, 1}, {512, 513}, {3, 3 + 512 * 8}, {0, kWords - 1}, {7, 4096}, {5, 5 + kSectionWords}};
  for (const auto& [a, b] : swaps) {
    const Value kept = word(a);
    set_word(a, word(b));
    set_word(b, kept);
    EXPECT_NE(digest(), before) << a << " and " << b;
    set_word(b, word(a));
    set_word(a, kept);
  }
  const Value first = word(0);
  set_word(0, {first.high, first.low});
  EXPECT_NE(digest(), before) << "the halves of one word";
}

TEST_F(BlockTest, EqualChangesInTwoPlacesDontCancel) {
  const Digest before = digest();
  for (const size_t distance : {size_t{1}, size_t{512}, size_t{1024}, size_t{4096}, kSectionWords}) {
    for (const int bit : {0, 7}) {
      for (const size_t byte : {size_t{0}, size_t{7}, size_t{8}, size_t{15}}) {
        flip(byte, bit);
        flip(byte + distance * sizeof(Value), bit);
        EXPECT_NE(digest(), before) << "distance " << distance << ", byte " << byte << ", bit " << bit;
        flip(byte, bit);
        flip(byte + distance * sizeof(Value), bit);
      }
    }
  }
}

TEST_F(BlockTest, BlocksOfOneValueDiffer) {
  std::set<std::pair<uint64_t, uint64_t>> seen;
  const uint64_t all_ones = ~uint64_t{0}, quiet_nan = 0x7ff8000000000000, signalling_nan = 0x7ff0000000000001;
  const uint64_t bf16_nans = 0x7fc07fc07fc07fc0, bf16_minus_zeros = 0x8000800080008000;
  const Value values[] = {{0, 0},
                          {0, 1},
                          {1, 0},
                          {all_ones, all_ones},
                          {quiet_nan, quiet_nan},
                          {signalling_nan, signalling_nan},
                          {bf16_nans, bf16_nans},
                          {bf16_minus_zeros, bf16_minus_zeros},
                          {0, all_ones}};
  for (const Value& value : values) {
    fill(value);
    const BlockReport found = report();
    EXPECT_EQ(found.is_constant, 1u);
    EXPECT_EQ(found.value, value);
    EXPECT_TRUE(seen.insert({found.digest.low, found.digest.high}).second);
  }
}

TEST_F(BlockTest, ConstantMeansEveryByteOfEveryWord) {
  EXPECT_EQ(report().is_constant, 0u);
  EXPECT_EQ(report().value, word(0));
  fill({5, 5});
  for (const size_t position : kPositions) {
    for (const size_t byte : {size_t{0}, size_t{8}, size_t{15}}) {
      flip(position * sizeof(Value) + byte, 0);
      EXPECT_EQ(report().is_constant, 0u) << "word " << position << ", byte " << byte;
      flip(position * sizeof(Value) + byte, 0);
    }
  }
  EXPECT_EQ(report().is_constant, 1u);
  flip(kBlockBytes - 1, 7);
  EXPECT_EQ(report().is_constant, 0u) << "all equal but the last byte";
}

TEST_F(BlockTest, ABlockOfEqualHalfWordsIsNoConstantUnlessWordsAreEqual) {
  for (size_t index = 0; index < kWords; ++index) set_word(index, index % 2 == 0 ? Value{1, 2} : Value{2, 1});
  EXPECT_EQ(report().is_constant, 0u);
}

TEST_F(BlockTest, TheSeedCounts) {
  std::set<std::pair<uint64_t, uint64_t>> seen;
  fill({});
  for (const Digest seed :
       {Digest{0, 0}, Digest{1, 0}, Digest{0, 1}, Digest{1, 1}, kSeed, Digest{kSeed.high, kSeed.low},
        Digest{uint64_t{1} << 63, 0}, Digest{0, uint64_t{1} << 63}}) {
    const Digest found = report(seed).digest;
    EXPECT_TRUE(seen.insert({found.low, found.high}).second) << seed.low << " " << seed.high;
    EXPECT_EQ(report(seed).digest, found);
  }
}

TEST_F(BlockTest, WhereTheBlockLiesInMemoryDoesNotCount) {
  std::vector<std::byte> shifted(kBlockBytes + 3);
  std::memcpy(shifted.data() + 3, block.data(), kBlockBytes);
  EXPECT_EQ(digest_block(shifted.data() + 3, kSeed), report());
}

TEST_F(BlockTest, FillWritesTheWholeBlockAndNothingElse) {
  std::vector<std::byte> guarded(kBlockBytes + 32, std::byte{0xee});
  fill_block(guarded.data() + 16, {1, 2});
  for (size_t index = 0; index < 16; ++index) {
    EXPECT_EQ(guarded[index], std::byte{0xee});
    EXPECT_EQ(guarded[kBlockBytes + 16 + index], std::byte{0xee});
  }
  const BlockReport found = digest_block(guarded.data() + 16, kSeed);
  EXPECT_EQ(found.is_constant, 1u);
  EXPECT_EQ(found.value, (Value{1, 2}));
}

TEST_F(BlockTest, SectionsMakeTheBlock) {
  const auto joined = [&] {
    BlockReport sections[kSections];
    for (uint32_t section = 0; section < kSections; ++section)
      sections[section] = digest_section(block.data(), section, kSeed);
    return join_sections(sections, kSeed);
  };
  EXPECT_EQ(joined(), report());
  fill({7, 7});
  EXPECT_EQ(joined(), report());
  EXPECT_EQ(joined().is_constant, 1u);
  flip(kBlockBytes - 1, 7);
  EXPECT_EQ(joined(), report()) << "one section differs from the first word of the block";
  EXPECT_EQ(joined().is_constant, 0u);
  EXPECT_EQ(digest_section(block.data(), kSections - 2, kSeed).is_constant, 1u);
  EXPECT_EQ(digest_section(block.data(), kSections - 1, kSeed).is_constant, 0u);
}

// Computed from the formula of digest_steps.h, independently of this code.
TEST_F(BlockTest, KnownAnswers) {
  EXPECT_EQ(digest(), (Digest{0xd9ec00adcfaa7e17, 0xddab9df25a0f7794}));
  fill({});
  EXPECT_EQ(digest(), (Digest{0xbb0c0e60cd1ac300, 0x48ab75b2d72e6013}));
}

TEST(KernelsPtx, IsOneString) {
  const std::string text = ptx();
  EXPECT_NE(text.find(".version"), std::string::npos);
  EXPECT_NE(text.find(std::string(".entry ") + kDigestEntry + "("), std::string::npos);
  EXPECT_NE(text.find(std::string(".entry ") + kFillEntry + "("), std::string::npos);
  EXPECT_EQ(text.find_last_not_of("\n\0"), text.rfind('}')) << "whole to its end";
}

}  // namespace
}  // namespace ebbtide::kernels
