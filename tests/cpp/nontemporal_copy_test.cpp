// The copy that bypasses the cache is exact at any alignment and size.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <random>
#include <vector>

#include "store/nontemporal_copy.h"

namespace ebbtide::testing {
namespace {

TEST(NontemporalCopy, AnyAlignmentAndSizeIsExactAndTouchesNothingElse) {
  std::mt19937_64 random(3);
  std::vector<std::byte> from(5000);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  std::vector<size_t> sizes = {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 4096};
  for (int i = 0; i < 40; ++i) sizes.push_back(random() % 4500);
  for (const size_t size : sizes) {
    for (const size_t to_shift : {0, 1, 7, 16, 63}) {
      for (const size_t from_shift : {0, 3, 64}) {
        std::vector<std::byte> to(5200, std::byte{0xAB});
        copy_nontemporal(to.data() + to_shift, from.data() + from_shift, size);
        ASSERT_EQ(std::memcmp(to.data() + to_shift, from.data() + from_shift, size), 0)
            << size << " " << to_shift << " " << from_shift;
        for (size_t before = 0; before < to_shift; ++before) ASSERT_EQ(to[before], std::byte{0xAB});
        for (size_t after = to_shift + size; after < to.size(); ++after) ASSERT_EQ(to[after], std::byte{0xAB});
      }
    }
  }
}

}  // namespace
}  // namespace ebbtide::testing
