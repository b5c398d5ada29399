// Addresses that are cut from large reservations: their positions, when they are reused, and what prevents reuse.
#include "vmm/address_arena.h"

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

static_assert(!std::is_copy_constructible_v<Addresses> && std::is_nothrow_move_constructible_v<Addresses>);

class AddressArenaTest : public CoreTest {
 protected:
  AddressArenaTest() { check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent"); }

  static constexpr uint64_t kLarge = AddressArena::kReservationBytes;
  static CUdeviceptr end_of(const Addresses& addresses) { return addresses.address() + addresses.size_bytes(); }

  // Leaves a mapping of these bytes that the driver has refused to undo.
  static void leave_mapped(CUdeviceptr address, size_t size_bytes) {
    const PhysicalMemory memory = PhysicalMemory::create_on_device(size_bytes, 0);
    const Mapping mapping = Mapping::map(address, memory);
    sim().fail("cuMemUnmap", 1, 999, 1);
  }

  AddressArena arena_;
};

TEST_F(AddressArenaTest, NeighboursLieSideBySideAndTheLowestGapIsTakenFirst) {
  Addresses first = arena_.take(kChunk);
  Addresses second = arena_.take(2 * kChunk);
  Addresses third = arena_.take(kChunk);
  EXPECT_EQ(end_of(first), second.address());
  EXPECT_EQ(end_of(second), third.address());
  EXPECT_TRUE(first.is_of_one_reservation_with(third));
  const CUdeviceptr low = first.address();
  const CUdeviceptr middle = second.address();
  first = Addresses{};
  second = Addresses{};
  const Addresses wide = arena_.take(3 * kChunk);
  EXPECT_EQ(wide.address(), low) << "gaps that meet are one";
  Addresses after = arena_.take(kChunk);
  EXPECT_EQ(after.address(), end_of(third));
  EXPECT_GT(after.address(), middle);
  EXPECT_EQ(Live::now().reservations, 1u);
}

TEST_F(AddressArenaTest, AGapThatIsTooSmallIsLeftForSomethingSmaller) {
  Addresses first = arena_.take(kChunk);
  const Addresses second = arena_.take(kChunk);
  const CUdeviceptr gap = first.address();
  first = Addresses{};
  const Addresses wide = arena_.take(2 * kChunk);
  EXPECT_EQ(wide.address(), end_of(second));
  const Addresses narrow = arena_.take(kChunk);
  EXPECT_EQ(narrow.address(), gap);
}

TEST_F(AddressArenaTest, GivenBackInAnyOrderTheyAreHandedOutAsABruteSearchWouldDo) {
  std::mt19937_64 random(7);
  const Addresses anchor = arena_.take(kChunk);
  const CUdeviceptr begin = anchor.address();
  std::map<CUdeviceptr, Addresses> taken;
  const auto lowest_gap = [&](size_t size_bytes) {
    CUdeviceptr gap = begin + kChunk;
    for (const auto& [address, addresses] : taken) {
      if (address - gap >= size_bytes) return gap;
      gap = end_of(addresses);
    }
    return gap;
  };
  for (int step = 0; step < 2000; ++step) {
    if (taken.size() < 40 && random() % 2 == 0) {
      const size_t size_bytes = (1 + random() % 5) * kChunk;
      const CUdeviceptr wanted = lowest_gap(size_bytes);
      Addresses addresses = arena_.take(size_bytes);
      ASSERT_EQ(addresses.address(), wanted) << "step " << step;
      taken.emplace(wanted, std::move(addresses));
    } else if (!taken.empty()) {
      taken.erase(std::next(taken.begin(), static_cast<std::ptrdiff_t>(random() % taken.size())));
    }
    ASSERT_EQ(Live::now().reservations, 1u);
  }
}

TEST_F(AddressArenaTest, AReservationGoesWithTheLastOfItsAddresses) {
  Addresses most = arena_.take(kLarge - kChunk);
  Addresses other = arena_.take(2 * kChunk);
  EXPECT_EQ(Live::now().reservations, 2u);
  EXPECT_FALSE(most.is_of_one_reservation_with(other));
  Addresses rest = arena_.take(kChunk);
  EXPECT_EQ(rest.address(), end_of(most)) << "the oldest reservation first, to its very end";
  most = Addresses{};
  EXPECT_EQ(Live::now().reservations, 2u);
  rest = Addresses{};
  EXPECT_EQ(Live::now().reservations, 1u);
  other = Addresses{};
  EXPECT_EQ(Live::now(), Live{});
  const Addresses again = arena_.take(kChunk);
  EXPECT_EQ(Live::now().reservations, 1u);
}

TEST_F(AddressArenaTest, ARangeAsLargeAsAReservationHasOneOfItsOwn) {
  for (const uint64_t size_bytes : {kLarge, kLarge + kChunk, 2 * kLarge}) {
    Addresses large = arena_.take(size_bytes);
    EXPECT_EQ(large.size_bytes(), size_bytes);
    const Addresses small = arena_.take(kChunk);
    EXPECT_FALSE(large.is_of_one_reservation_with(small));
    EXPECT_EQ(Live::now().reservations, 2u);
    large = Addresses{};
    EXPECT_EQ(Live::now().reservations, 1u);
  }
  EXPECT_EQ(Live::now(), Live{});
}

TEST_F(AddressArenaTest, AddressesOutliveTheirArena) {
  auto arena = std::make_unique<AddressArena>();
  Addresses addresses = arena->take(kChunk);
  Addresses moved = std::move(addresses);
  auto& same = moved;
  moved = std::move(same);
  EXPECT_EQ(addresses.address(), 0u);  // NOLINT(bugprone-use-after-move): what a moved-from owner is
  arena.reset();
  EXPECT_EQ(Live::now().reservations, 1u);
  moved = Addresses{};
  EXPECT_EQ(Live::now(), Live{});
}

TEST_F(AddressArenaTest, WhereThereIsNoRoomForALargeReservationTheExactSizeIsReserved) {
  if (is_hip()) GTEST_SKIP() << "the driver reserves no ranges for arenas there";
  sim().clear_log();
  sim().fail("cuMemAddressReserve", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
  const Addresses exact = arena_.take(2 * kChunk);
  EXPECT_EQ(sim().calls("cuMemAddressReserve"), 2u);
  const Addresses next = arena_.take(kChunk);
  EXPECT_FALSE(exact.is_of_one_reservation_with(next)) << "the first one is full";
  EXPECT_EQ(Live::now().reservations, 2u);
}

TEST_F(AddressArenaTest, Invariant3_WithoutAddressesNothingIsTakenAndNothingLeaks) {
  if (is_hip()) GTEST_SKIP() << "the driver reserves no ranges for arenas there";
  sim().fail("cuMemAddressReserve", 1, CUDA_ERROR_OUT_OF_MEMORY, 0);
  EXPECT_THROW(arena_.take(kChunk), DriverError);
  EXPECT_THROW(arena_.take(kLarge + kChunk), DriverError);
  sim().clear_failures();
  sim().clear_log();
  sim().fail("cuMemAddressReserve", 1, 999, 0);
  EXPECT_THROW(arena_.take(kChunk), DriverError);
  EXPECT_EQ(sim().calls("cuMemAddressReserve"), 2u) << "whatever is said to many: there may be fewer";
  sim().clear_failures();
  EXPECT_EQ(Live::now(), Live{});
  const Addresses addresses = arena_.take(kChunk);
  sim().fail("cuMemAddressReserve", 1, CUDA_ERROR_OUT_OF_MEMORY, 0);
  EXPECT_THROW(arena_.take(kLarge), DriverError);
  const Addresses next = arena_.take(kChunk);
  EXPECT_EQ(next.address(), end_of(addresses)) << "reserved addresses need no call";
}

TEST_F(AddressArenaTest, Invariant3_AllocationsDoWithSmallReservationsAndFailWithoutAny) {
  if (is_hip()) GTEST_SKIP() << "the driver reserves no ranges for arenas there";
  sim().fail("cuMemAddressReserve", 1, CUDA_ERROR_OUT_OF_MEMORY, 1);
  const CUdeviceptr address = alloc("w", 2 * kChunk);
  sim().fail("cuMemAddressReserve", 1, CUDA_ERROR_OUT_OF_MEMORY, 0);
  const Live before = Live::now();
  EXPECT_THROW(alloc("w", kChunk), Error);
  EXPECT_EQ(Live::now(), before);
  EXPECT_EQ(core().budgets.device.held_bytes(0), 2 * kChunk);
  sim().clear_failures();
  fill(address, 2 * kChunk, 1);
  const CUdeviceptr other = alloc("w", kChunk);
  fill(other, kChunk, 2);
  pause();
  resume();
  EXPECT_EQ(Live::now().handles, 2u) << "no handle can lie in two reservations";
  EXPECT_TRUE(holds(address, 2 * kChunk, 1));
  EXPECT_TRUE(holds(other, kChunk, 2));
  expect_no_leak();
}

TEST_F(AddressArenaTest, Invariant3_AddressesUnderAMappingThatCouldNotBeUndoneWaitForIt) {
  Addresses mapped = arena_.take(kChunk);
  Addresses beside = arena_.take(kChunk);
  const CUdeviceptr address = mapped.address();
  leave_mapped(address, kChunk);
  EXPECT_EQ(deferred_undos::count(), 1u);
  mapped = Addresses{};
  Addresses other = arena_.take(kChunk);
  EXPECT_EQ(other.address(), end_of(beside)) << "mapped addresses are not given out";
  sim().fail("cuMemUnmap", 1, 999, 1);
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 1u);
  const Addresses another = arena_.take(kChunk);
  EXPECT_EQ(another.address(), end_of(other));
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_EQ(Live::now().mappings, 0u);
  const Addresses again = arena_.take(kChunk);
  EXPECT_EQ(again.address(), address);
}

TEST_F(AddressArenaTest, Invariant3_AMappingOverSeveralKeepsAllOfThemAndTheirReservation) {
  Addresses first = arena_.take(kChunk);
  Addresses second = arena_.take(kChunk);
  Addresses third = arena_.take(kChunk);
  leave_mapped(first.address(), 2 * kChunk);
  const CUdeviceptr low = first.address();
  const CUdeviceptr free = third.address();
  second = Addresses{};
  third = Addresses{};
  first = Addresses{};
  EXPECT_EQ(Live::now().reservations, 1u);
  Addresses next = arena_.take(kChunk);
  EXPECT_EQ(next.address(), free) << "beside the mapping, not under it";
  deferred_undos::retry(true);
  const Addresses both = arena_.take(2 * kChunk);
  EXPECT_EQ(both.address(), low);
  next = Addresses{};
  EXPECT_EQ(Live::now().reservations, 1u);
}

TEST_F(AddressArenaTest, Invariant3_WithTheMappingTheReservationGoesEvenWithoutItsArena) {
  auto arena = std::make_unique<AddressArena>();
  Addresses addresses = arena->take(kChunk);
  leave_mapped(addresses.address(), kChunk);
  addresses = Addresses{};
  arena.reset();
  EXPECT_EQ(Live::now().reservations, 1u);
  sim().fail("cuMemAddressFree", 1, 999, 1);
  deferred_undos::retry(true);
  EXPECT_EQ(Live::now().mappings, 0u);
  EXPECT_EQ(deferred_undos::count(), 1u) << "now the reservation waits";
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_EQ(Live::now(), Live{});
}

TEST_F(AddressArenaTest, SeveralThreadsTakeAndGiveBackAtOnce) {
  constexpr int kThreads = 4;
  std::mutex mutex;
  std::map<CUdeviceptr, CUdeviceptr> taken;  // begin -> end
  const auto note = [&](const Addresses& addresses) {
    const std::lock_guard lock(mutex);
    const auto after = taken.lower_bound(addresses.address());
    EXPECT_TRUE(after == taken.end() || end_of(addresses) <= after->first);
    EXPECT_TRUE(after == taken.begin() || std::prev(after)->second <= addresses.address());
    taken.emplace(addresses.address(), end_of(addresses));
  };
  const auto forget = [&](Addresses& addresses) {
    {
      const std::lock_guard lock(mutex);
      taken.erase(addresses.address());
    }
    addresses = Addresses{};
  };
  const auto work = [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<Addresses> mine(8);
    for (int step = 0; step < 500; ++step) {
      Addresses& each = mine[random() % mine.size()];
      if (each.address() != 0) {
        forget(each);
      } else {
        each = arena_.take((1 + random() % 3) * kChunk);
        note(each);
      }
    }
    for (Addresses& each : mine) forget(each);
  };
  {
    std::vector<std::jthread> threads;
    for (uint64_t seed = 1; seed <= kThreads; ++seed) threads.emplace_back(work, seed);
  }
  EXPECT_EQ(Live::now(), Live{});
}

}  // namespace
}  // namespace ebbtide::testing
