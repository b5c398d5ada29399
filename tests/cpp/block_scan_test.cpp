// A scan of blocks, few and many, gives the processor's answers.
#include "core/transfer/block_scan.h"

#include <gtest/gtest.h>

#include <cstring>

#include "driver/context.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr kernels::Digest kSeed{7, 8};

struct BlockScanTest : ThreadsTest {
  // Blocks of distinct content, of which every third is one value.
  void write(CUdeviceptr address, size_t count, uint64_t salt) {
    for (uint64_t index = 0; index < count; ++index) {
      std::byte* const block = block_at(address, index);
      kernels::fill_block(block, {index, salt});
      if (index % 3 != 0) std::memcpy(block + kernels::kBlockBytes - 8 * index - 8, &salt, sizeof salt);
    }
  }
  static std::byte* block_at(CUdeviceptr address, size_t index) {
    return reinterpret_cast<std::byte*>(address) + index * kernels::kBlockBytes;
  }
};

TEST_F(BlockScanTest, FewBlocksAndManyAreReportedAsTheyAre) {
  for (const size_t count : {1, 31, 32, 33}) {
    SCOPED_TRACE(count);
    const CUdeviceptr address = alloc("w", count * kernels::kBlockBytes);
    write(address, count, 1);
    EnginePool::Loan loan = core().engines.borrow(0, {.bytes = 1});
    const auto scan = BlockScan::create(loan, count, kSeed);
    ASSERT_NE(scan, nullptr);
    EXPECT_EQ(scan->add(address, count * kernels::kBlockBytes), 0u);
    scan->launch();
    for (size_t index = count; index-- > 0;)
      EXPECT_EQ(scan->report(index), kernels::digest_block(block_at(address, index), kSeed)) << index;
    const kernels::BlockReport before = scan->report(count - 1);
    write(address, count, 2);
    const kernels::BlockReport* const again = scan->look_again(count / 2, count - count / 2);
    for (size_t index = count / 2; index < count; ++index)
      EXPECT_EQ(again[index - count / 2], kernels::digest_block(block_at(address, index), kSeed)) << index;
    EXPECT_EQ(scan->report(count - 1), before) << "the first look stays";
  }
}

TEST_F(BlockScanTest, ASecondLookFollowsTheCopiesInTheirStream) {
  const CUdeviceptr address = alloc("w", 2 * kernels::kBlockBytes);
  write(address, 2, 1);
  EnginePool::Loan loan = core().engines.borrow(0, {.bytes = 1});
  const auto scan = BlockScan::create(loan, 2, kSeed);
  ASSERT_NE(scan, nullptr);
  scan->add(address, 2 * kernels::kBlockBytes);
  const kernels::BlockReport before = kernels::digest_block(block_at(address, 1), kSeed);
  const CUstream stream = loan.engine().stream().get();
  const ContextScope scope(0);
  scan->launch_before_copies();
  check(driver().cuMemsetD8Async(address + kernels::kBlockBytes, 9, kernels::kBlockBytes, stream), "cuMemsetD8Async");
  scan->queue_second_look(0, 2);
  loan.engine().stream().synchronize();
  EXPECT_EQ(scan->report(1), before);
  EXPECT_EQ(scan->second_look(0, 2)[1], kernels::digest_block(block_at(address, 1), kSeed));
  EXPECT_EQ(scan->second_look(1, 1)[0], scan->second_look(0, 2)[1]);
}

TEST_F(BlockScanTest, AScanIsShortWhileItIsOneLaunch) {
  EnginePool::Loan loan = core().engines.borrow(0, {.bytes = 1});
  const auto scan = BlockScan::create(loan, 513, kSeed);
  ASSERT_NE(scan, nullptr);
  scan->add(0, 512 * kernels::kBlockBytes);
  EXPECT_TRUE(scan->is_short());
  scan->add(0, kernels::kBlockBytes);
  EXPECT_FALSE(scan->is_short());
}

TEST_F(BlockScanTest, ATableForManyBlocksIsEnoughForFewer) {
  uint64_t last = 0;
  for (size_t count = 1; count < 100; ++count) {
    EXPECT_GT(BlockScan::table_bytes(count), last) << count;
    last = BlockScan::table_bytes(count);
  }
}

}  // namespace
}  // namespace ebbtide::testing
