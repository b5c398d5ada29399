// Which rings are made, kept and lent, and how copies cut them.
#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <utility>

#include "base/error.h"
#include "driver/context.h"
#include "policy/copy_plan.h"
#include "threads_fixture.h"

namespace ebbtide::testing {
namespace {

using EnginePoolTest = ThreadsTest;

constexpr uint64_t kBytesPerThread = 8 * kMiB;

// A copy that gets this many threads, whether or not its memory is fresh, and a ring for all of its bytes.
policy::CopyNeed need(int threads) {
  const uint64_t bytes = kBytesPerThread * static_cast<uint64_t>(threads);
  return {.bytes = bytes, .fresh_bytes = bytes, .cores = 1, .wanted_threads = threads};
}

TEST_F(EnginePoolTest, TheEnginePoolKeepsEnginesWithinTheBudgets) {
  EnginePool& pool = core().engines;
  const uint64_t small = kBytesPerThread;
  {
    EnginePool::Loan first = pool.borrow(0, need(1));
    EnginePool::Loan second = pool.borrow(1, need(2));
    EXPECT_EQ(first.engine().staging().size_bytes(), small);
    EXPECT_EQ(second.engine().staging().size_bytes(), 2 * small);
    EXPECT_EQ(second.cut().threads, 2);
    EXPECT_EQ(pool.held_bytes(), 3 * small);
    EXPECT_EQ(core().budgets.host.held_bytes(), 3 * small);
  }
  EXPECT_EQ(Live::now().registered_ranges, 2u) << "one for each device";
  EXPECT_EQ(core().budgets.host.held_bytes(), pool.held_bytes());
  EXPECT_EQ(core().budgets.pinned.held_bytes(), pool.held_bytes());
  EXPECT_EQ(pool.held_bytes(), 3 * small);
  const Live before = Live::now();
  pool.borrow(1, need(2));
  EXPECT_EQ(Live::now(), before) << "the kept engine is lent again";
  {
    std::deque<EnginePool::Loan> loans;
    for (int count = 0; count < 4; ++count) loans.push_back(pool.borrow(0, need(1)));
  }
  EXPECT_EQ(pool.held_bytes(), 2 * small + 2 * small) << "two are kept for a device";
  pool.trim();
  pool.trim();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  EXPECT_EQ(Live::now().registered_ranges, 0u);
  core().budgets.host.set_limit(5 * policy::kLeastRingBytes);
  {
    EnginePool::Loan loan = pool.borrow(0, need(8));
    EXPECT_EQ(loan.engine().staging().size_bytes(), 2 * small) << "as much as fits";
    EXPECT_EQ(loan.cut().piece_bytes, small / 2);
  }
  pool.trim();
  core().budgets.host.set_limit(policy::kLeastRingBytes - 1);
  EXPECT_THROW(pool.borrow(0, need(8)), StoreError);
  EXPECT_EQ(Live::now().registered_ranges, 0u);
}

TEST_F(EnginePoolTest, TheRingLeavesRoomForTheTables) {
  EnginePool& pool = core().engines;
  constexpr uint64_t kTable = 64 * kKiB;
  const auto ring_bytes = [&](uint64_t limit_bytes, bool has_table) {
    pool.trim();
    core().budgets.host.set_limit(limit_bytes);
    EnginePool::Loan loan = pool.borrow(0, need(8), {.table_bytes = kTable});
    EXPECT_EQ(loan.try_table(kTable) != nullptr, has_table);
    EXPECT_EQ(core().budgets.host.held_bytes(), pool.held_bytes());
    EXPECT_EQ(core().budgets.pinned.held_bytes(), pool.held_bytes());
    return loan.engine().staging().size_bytes();
  };
  const uint64_t least = policy::kLeastRingBytes;
  EXPECT_EQ(ring_bytes(2 * least, true), least) << "a ring of all of it would leave none";
  EXPECT_EQ(ring_bytes(2 * least + kTable, true), 2 * least);
  EXPECT_EQ(ring_bytes(least, false), least) << "the ring that everything needs comes first";
  EXPECT_EQ(ring_bytes(least + kTable - 1, false), least);
  pool.trim();
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  core().budgets.host.set_limit(least - 1);
  EXPECT_THROW(pool.borrow(0, need(8), {.table_bytes = kTable}), StoreError);
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
  core().budgets.host.set_limit(kUnlimited);
  for (const char* call : {"cuMemHostRegister", "cuStreamCreateWithPriority"}) {
    sim().fail(call, 1, CUDA_ERROR_UNKNOWN, 100);
    EXPECT_THROW(pool.borrow(0, need(8), {.table_bytes = kTable}), DriverError) << call;
    sim().clear_failures();
    EXPECT_EQ(core().budgets.host.held_bytes(), 0u) << call;
    EXPECT_EQ(pool.held_bytes(), 0u) << call;
  }
  EXPECT_EQ(Live::now().registered_ranges, 0u);
  EXPECT_EQ(Live::now().pinned_blocks, 0u);
}

TEST_F(EnginePoolTest, AKeptRingThatIsTooSmallServesWhereNoLargerOneCanBeHad) {
  EnginePool& pool = core().engines;
  pool.borrow(0, need(1));
  const Live before = Live::now();
  core().budgets.host.set_limit(0);  // as if another process had taken the host's memory meanwhile
  EXPECT_EQ(pool.borrow(0, need(4)).engine().staging().size_bytes(), kBytesPerThread);
  core().budgets.host.set_limit(kUnlimited);
  sim().fail("cuStreamCreateWithPriority", 1, CUDA_ERROR_UNKNOWN, 100);
  EXPECT_THROW(pool.borrow(0, need(4)), DriverError);
  sim().clear_failures();
  EXPECT_EQ(Live::now(), before) << "and it is kept";
  EXPECT_EQ(core().budgets.host.held_bytes(), pool.held_bytes());
  pool.borrow(0, need(4));
  EXPECT_EQ(core().budgets.host.held_bytes(), pool.held_bytes());
  EXPECT_EQ(Live::now().registered_ranges, 1u) << "the larger one took its place";
}

TEST_F(EnginePoolTest, IdleRingsOfOtherDevicesGiveWay) {
  EnginePool& pool = core().engines;
  {
    const std::array loans{pool.borrow(0, need(1)), pool.borrow(0, need(1))};
  }
  core().budgets.host.set_limit(2 * kBytesPerThread + policy::kLeastRingBytes - 1);
  EXPECT_EQ(pool.borrow(1, need(1)).engine().staging().size_bytes(), kBytesPerThread);
  EXPECT_EQ(pool.held_bytes(), kBytesPerThread);
}

TEST_F(EnginePoolTest, OfTwoKeptRingsTheOneThatIsLargeEnoughIsLent) {
  EnginePool& pool = core().engines;
  {
    const EnginePool::Loan large = pool.borrow(0, need(4));
    pool.borrow(0, need(1));
  }
  const Live before = Live::now();
  EXPECT_EQ(pool.borrow(0, need(4)).cut().threads, 4);
  EXPECT_EQ(Live::now(), before) << "neither was made anew";
}

TEST_F(EnginePoolTest, OneRingServesCopiesThatCutItDifferently) {
  EnginePool& pool = core().engines;
  const policy::CopyNeed fresh = {.bytes = kGiB, .fresh_bytes = kGiB, .cores = 16};
  const policy::CopyNeed touched = {.bytes = kGiB, .fresh_bytes = 0, .cores = 16};
  pool.borrow(0, fresh);
  const Live before = Live::now();
  EXPECT_EQ(pool.borrow(0, touched).cut().threads, policy::kMaxThreadsToStore);
  const EnginePool::Loan loan = pool.borrow(0, fresh);
  EXPECT_EQ(loan.cut().threads, policy::kMaxCopyThreads);
  EXPECT_EQ(loan.cut().piece_bytes, policy::kLargestPieceBytes);
  EXPECT_EQ(loan.cut().part_bytes, policy::kPartBytes);
  EXPECT_EQ(Live::now(), before) << "nothing was pinned or made anew";
}

// The ring is kept. A copy into memory then uses as much of it as that copy wants.
TEST_F(EnginePoolTest, TheRingOfFilesIsLarger) {
  EnginePool& pool = core().engines;
  const policy::CopyNeed memory = {.bytes = kGiB, .cores = 16};
  policy::CopyNeed files = memory;
  files.has_files = true;
  EXPECT_EQ(pool.borrow(0, files).cut().ring_bytes, policy::kMaxThreadsWithFiles * 2 * policy::kRequestBytes);
  const Live before = Live::now();
  const EnginePool::Loan loan = pool.borrow(0, memory);
  EXPECT_EQ(loan.cut().ring_bytes, policy::kLargestRingBytes);
  EXPECT_EQ(loan.cut().request_bytes, policy::kRequestBytes);
  EXPECT_EQ(Live::now(), before);
}

TEST_F(EnginePoolTest, AnEngineIsMadeWholeOrNotAtAll) {
  EnginePool& pool = core().engines;
  const Live before = Live::now();
  using Failure = std::pair<const char*, uint64_t>;
  for (const auto& [call, k] :
       {Failure{"cuStreamCreate", 1}, Failure{"cuStreamCreateWithPriority", 1}, Failure{"cuEventCreate", 1},
        Failure{"cuEventCreate", 17}, Failure{"cuEventCreate", 32}}) {
    sim().fail(call, k, CUDA_ERROR_UNKNOWN, 1);
    EXPECT_THROW(pool.borrow(0, need(4)), DriverError) << call << " " << k;
    sim().clear_failures();
    EXPECT_EQ(Live::now(), before);
    EXPECT_EQ(pool.held_bytes(), 0u);
    EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
    EXPECT_EQ(core().budgets.pinned.held_bytes(), 0u);
  }
  EXPECT_EQ(pool.borrow(0, need(4)).cut().threads, 4);
}

// Other threads do not wait for the unpinning, which takes long.
TEST_F(EnginePoolTest, NoPauseWaitsForARingThatIsGivenUp) {
  EnginePool& pool = core().engines;
  pool.borrow(0, need(1));
  pool.borrow(1, need(1));
  {
    const Slow slow("cuMemHostUnregister", 5 * kStand, [&] { pool.trim(); });
    pool.borrow(1, need(1));
    EXPECT_TRUE(slow.is_running());
  }
  {
    std::deque<EnginePool::Loan> loans;
    for (int count = 0; count < 3; ++count) loans.push_back(pool.borrow(0, need(1)));
    const Slow slow("cuMemHostUnregister", 5 * kStand, [&] { loans.clear(); });
    pool.borrow(1, need(1));
    EXPECT_TRUE(slow.is_running());
  }
  pool.trim();
  EXPECT_EQ(pool.held_bytes(), 0u);
  EXPECT_EQ(core().budgets.host.held_bytes(), 0u);
}

// A ring that is leaked on purpose still counts, because its memory still exists.
TEST_F(EnginePoolTest, APoisonedRingIsNeverLentAgainAndStaysInTheBooks) {
  const uint64_t small = kBytesPerThread;
  {
    core().engines.borrow(0, need(1)).engine().poison();
  }
  EXPECT_EQ(Live::now().registered_ranges, 1u);
  EXPECT_EQ(core().budgets.host.held_bytes(), small);
  EXPECT_EQ(core().engines.held_bytes(), small);
  EXPECT_EQ(core().budgets.pinned.held_bytes(), small);
  {
    core().engines.borrow(0, need(1));
  }
  EXPECT_EQ(Live::now().registered_ranges, 2u);
  EXPECT_EQ(core().budgets.host.held_bytes(), 2 * small);
}

}  // namespace
}  // namespace ebbtide::testing
