// Which parts of slabs are taken: decisions on plain numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "policy/slab_space.h"

namespace ebbtide::policy {
namespace {

TEST(SlabSpace, TheSmallestFreeRangeThatHasRoomIsCut) {
  SlabSpace space;
  EXPECT_EQ(space.take(1), std::nullopt);
  space.add(1000, 100);
  space.add(2000, 60);
  space.add(3000, 80);
  EXPECT_EQ(space.take(60), 2000u);
  EXPECT_EQ(space.take(60), 3000u);
  EXPECT_EQ(space.take(20), 3060u);
  EXPECT_EQ(space.take(101), std::nullopt);
  EXPECT_EQ(space.take(30), 1000u);
  EXPECT_EQ(space.take(70), 1030u);
  EXPECT_EQ(space.take(1), std::nullopt);
  EXPECT_EQ(space.used_bytes(), 240u);
  EXPECT_EQ(space.held_bytes(), 240u);
}

TEST(SlabSpace, NeighboursThatAreFreeBecomeOne) {
  SlabSpace space;
  space.add(0, 30);
  for (const uint64_t address : {0, 10, 20}) EXPECT_EQ(space.take(10), address);
  EXPECT_TRUE(space.give_back(0));
  EXPECT_TRUE(space.give_back(20));
  EXPECT_EQ(space.take(20), std::nullopt);
  EXPECT_TRUE(space.give_back(10));
  EXPECT_EQ(space.take(30), 0u);
}

TEST(SlabSpace, SlabsSideBySideStayApart) {
  SlabSpace space;
  space.add(0, 10);
  space.add(10, 10);
  EXPECT_EQ(space.take(20), std::nullopt);
  EXPECT_EQ(space.take(10), 0u);
  EXPECT_EQ(space.take(10), 10u);
  EXPECT_TRUE(space.give_back(0));
  EXPECT_TRUE(space.give_back(10));
  EXPECT_EQ(space.take(20), std::nullopt);
  EXPECT_EQ(space.find_free_slab(), 0u);
  space.remove(0);
  EXPECT_EQ(space.find_free_slab(), 10u);
  space.remove(10);
  EXPECT_EQ(space.find_free_slab(), std::nullopt);
  EXPECT_EQ(space.held_bytes(), 0u);
}

TEST(SlabSpace, OnlyWhatWasTakenCanBeGivenBackAndOnce) {
  SlabSpace space;
  space.add(100, 50);
  EXPECT_EQ(space.take(20), 100u);
  EXPECT_FALSE(space.give_back(99));
  EXPECT_FALSE(space.give_back(110));
  EXPECT_FALSE(space.give_back(120)) << "it is free";
  EXPECT_FALSE(space.give_back(500));
  EXPECT_EQ(space.find_free_slab(), std::nullopt);
  EXPECT_TRUE(space.give_back(100));
  EXPECT_FALSE(space.give_back(100));
  EXPECT_EQ(space.find_free_slab(), 100u);
}

TEST(SlabSpace, PermanentSlabsNeverComeBack) {
  SlabSpace space;
  space.add(0, 30);
  for (int piece = 0; piece < 3; ++piece) space.take(10);
  EXPECT_FALSE(space.keep_for_good(30));
  EXPECT_TRUE(space.keep_for_good(19));
  EXPECT_TRUE(space.keep_for_good(10)) << "it is kept already";
  for (const uint64_t piece : {0, 10, 20}) EXPECT_TRUE(space.give_back(piece));
  EXPECT_FALSE(space.give_back(10));
  EXPECT_FALSE(space.keep_for_good(0)) << "it is free";
  EXPECT_EQ(space.find_free_slab(), std::nullopt);
  EXPECT_EQ(space.used_bytes(), 10u);
  EXPECT_EQ(space.take(20), std::nullopt);
  EXPECT_EQ(space.take(10), 0u);
  EXPECT_EQ(space.take(10), 20u);
}

// The model: which addresses of which slab are taken, and by which pieces.
struct Model {
  std::map<uint64_t, uint64_t> slabs;
  std::map<uint64_t, uint64_t> pieces;

  std::vector<std::pair<uint64_t, uint64_t>> free_ranges() const {
    std::vector<std::pair<uint64_t, uint64_t>> found;  // size and address
    for (const auto& [slab, size_bytes] : slabs) {
      uint64_t at = slab;
      for (auto piece = pieces.lower_bound(slab); piece != pieces.end() && piece->first < slab + size_bytes; ++piece) {
        if (piece->first > at) found.emplace_back(piece->first - at, at);
        at = piece->first + piece->second;
      }
      if (at < slab + size_bytes) found.emplace_back(slab + size_bytes - at, at);
    }
    std::sort(found.begin(), found.end());
    return found;
  }
};

TEST(SlabSpace, ARandomWalkAgreesWithAModel) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 20; ++round) {
    SlabSpace space;
    Model model;
    uint64_t next_slab = 0;
    for (int step = 0; step < 600; ++step) {
      const auto choice = random() % 20;
      if (choice == 0 || model.slabs.empty()) {
        const uint64_t size_bytes = 1 + random() % 500;
        space.add(next_slab, size_bytes);
        model.slabs.emplace(next_slab, size_bytes);
        next_slab += size_bytes + (random() % 2) * 1000;  // some lie side by side
      } else if (choice == 1) {
        if (const auto slab = space.find_free_slab()) {
          const auto piece = model.pieces.lower_bound(*slab);
          ASSERT_TRUE(piece == model.pieces.end() || piece->first >= *slab + model.slabs.at(*slab));
          space.remove(*slab);
          model.slabs.erase(*slab);
        }
      } else if (choice < 12) {
        const uint64_t size_bytes = 1 + random() % 120;
        const auto free = model.free_ranges();
        const auto best = std::lower_bound(free.begin(), free.end(), std::pair<uint64_t, uint64_t>{size_bytes, 0});
        const auto taken = space.take(size_bytes);
        ASSERT_EQ(taken.has_value(), best != free.end()) << "a range that has room is found";
        if (!taken) continue;
        ASSERT_EQ(*taken, best->second) << "and it is the smallest";
        model.pieces.emplace(*taken, size_bytes);
      } else if (!model.pieces.empty()) {
        const auto piece = std::next(model.pieces.begin(), static_cast<int64_t>(random() % model.pieces.size()));
        ASSERT_TRUE(space.give_back(piece->first));
        model.pieces.erase(piece);
      }
      uint64_t held_bytes = 0;
      uint64_t used_bytes = 0;
      for (const auto& [slab, size_bytes] : model.slabs) held_bytes += size_bytes;
      for (const auto& [piece, size_bytes] : model.pieces) used_bytes += size_bytes;
      ASSERT_EQ(space.held_bytes(), held_bytes);
      ASSERT_EQ(space.used_bytes(), used_bytes);
    }
    for (const auto& [piece, size_bytes] : model.pieces) ASSERT_TRUE(space.give_back(piece));
    size_t slabs = 0;
    for (; const auto slab = space.find_free_slab(); ++slabs) space.remove(*slab);
    EXPECT_EQ(slabs, model.slabs.size()) << "nothing is lost to fragmentation once all is given back";
    EXPECT_EQ(space.held_bytes(), 0u);
  }
}

}  // namespace
}  // namespace ebbtide::policy
