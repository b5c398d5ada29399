// The owners of driver objects, and what becomes of objects that the driver refuses to release.
#include <gtest/gtest.h>

#include <type_traits>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/peers.h"
#include "driver/stream.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

static_assert(!std::is_copy_constructible_v<Reservation> && std::is_nothrow_move_constructible_v<Reservation>);
static_assert(!std::is_copy_constructible_v<PhysicalMemory> && std::is_nothrow_move_constructible_v<PhysicalMemory>);
static_assert(!std::is_copy_constructible_v<Mapping> && std::is_nothrow_move_constructible_v<Mapping>);
static_assert(!std::is_copy_constructible_v<DeviceCharge> && !std::is_copy_constructible_v<HostCharge>);

class VmmTest : public CoreTest {
 protected:
  VmmTest() { check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent"); }
};

TEST_F(VmmTest, OwnersGiveBackWhatTheyOwnOnce) {
  {
    Reservation range = Reservation::reserve(2 * kChunk);
    PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 1);
    Mapping mapping = Mapping::map(range.address() + kChunk, memory);
    EXPECT_EQ(memory.device(), 1);
    Reservation other_range = std::move(range);
    PhysicalMemory other_memory = std::move(memory);
    Mapping other_mapping = std::move(mapping);
    EXPECT_EQ(range.address(), 0u);     // NOLINT(bugprone-use-after-move): what a moved-from owner is
    EXPECT_FALSE(memory.has_handle());  // NOLINT(bugprone-use-after-move)
    EXPECT_FALSE(mapping.is_mapped());  // NOLINT(bugprone-use-after-move)
    EXPECT_TRUE(other_mapping.is_mapped());
    EXPECT_EQ(Live::now().mappings, 1u);
  }
  EXPECT_EQ(Live::now(), Live{});
}

TEST_F(VmmTest, AssignmentGivesBackWhatStoodThere) {
  Reservation range = Reservation::reserve(2 * kChunk);
  PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
  Mapping mapping = Mapping::map(range.address(), memory);
  mapping = Mapping{};
  EXPECT_EQ(Live::now().mappings, 0u);
  memory = PhysicalMemory::create_on_device(2 * kChunk, 0);
  EXPECT_EQ(Live::now().handles, 1u);
  EXPECT_EQ(Live::now().device_bytes, 2 * kChunk);
  range = Reservation::reserve(kChunk);
  EXPECT_EQ(Live::now().reservations, 1u);
  auto& same = memory;
  memory = std::move(same);
  EXPECT_TRUE(memory.has_handle());
}

// CoreTest has two devices.
TEST(MappingTest, ADeviceThatIsRefusedKeepsNoOtherFromItsAccess) {
  sim().reset();
  sim().set_device_count(3);
  use_driver("sim");
  check(driver().cuInit(0), "cuInit");
  check(driver().cuCtxSetCurrent(primary_context(0)), "cuCtxSetCurrent");
  const DeviceSet peers = only(1) | only(2);
  Reservation range = Reservation::reserve(kChunk);
  PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
  for (const int refused : {1, 2}) {
    Mapping mapping = Mapping::map(range.address(), memory);
    sim().fail("cuMemSetAccess", 1, 999, 1);                      // for both
    sim().fail("cuMemSetAccess", 1 + unsigned(refused), 999, 1);  // for this one alone
    EXPECT_EQ(mapping.grant(peers), 999) << refused;
    EXPECT_EQ(mapping.missing(peers), only(refused));
    sim().clear_failures();
    EXPECT_EQ(mapping.grant(peers), CUDA_SUCCESS);
    EXPECT_TRUE(mapping.missing(peers).none());
  }
}

TEST_F(VmmTest, ReleaseAndUnmapThrowAndKeepTheObject) {
  Reservation range = Reservation::reserve(kChunk);
  PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
  Mapping mapping = Mapping::map(range.address(), memory);
  sim().fail("cuMemUnmap", 1, 999, 1);
  sim().fail("cuMemRelease", 1, 999, 1);
  EXPECT_THROW(mapping.unmap(), DriverError);
  EXPECT_TRUE(mapping.is_mapped());
  EXPECT_THROW(memory.release(), DriverError);
  EXPECT_TRUE(memory.has_handle());
  mapping.unmap();
  mapping.unmap();
  memory.release();
  memory.release();
  EXPECT_EQ(Live::now().handles + Live::now().mappings, 0u);
}

TEST_F(VmmTest, AMapWhoseAccessFailsIsUndone) {
  Reservation range = Reservation::reserve(kChunk);
  PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
  sim().fail("cuMemSetAccess", 1, 999, 1);
  try {
    Mapping::map(range.address(), memory);
    FAIL() << "nothing was thrown";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call, "cuMemSetAccess");
    EXPECT_EQ(error.code, 999);
    EXPECT_NE(error.arguments.find("size=2097152"), std::string::npos);
  }
  EXPECT_EQ(Live::now().mappings, 0u);
}

TEST_F(VmmTest, LimboTakesWhatADestructorCouldNotGiveBackAndTriesInOrder) {
  for (const char* call : {"cuMemSetAccess", "cuMemUnmap", "cuMemRelease"}) sim().fail(call, 1, 999, 1);
  try {
    const Reservation range = Reservation::reserve(kChunk);
    const PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
    const Mapping mapping = Mapping::map(range.address(), memory);
    FAIL() << "nothing was thrown";
  } catch (const DriverError&) {
  }
  // The unmap failed, and so did the release. The range cannot be freed while something is mapped in it.
  const size_t ranges = is_hip() ? 0 : 1;  // the process holds it there
  EXPECT_EQ(deferred_undos::count(), 2 + ranges);
  EXPECT_EQ(deferred_undos::held_bytes(0), kChunk) << "one chunk, whether its unmap or its release is due";
  EXPECT_EQ(deferred_undos::held_bytes(1), 0u);
  sim().clear_failures();
  sim().fail("cuMemUnmap", 1, 999, 1);
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 1 + ranges);
  EXPECT_EQ(deferred_undos::held_bytes(0), kChunk) << "the mapping holds the memory of the released handle";
  sim().clear_failures();
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_EQ(deferred_undos::held_bytes(0), 0u);
  EXPECT_EQ(Live::now(), Live{});
}

TEST_F(VmmTest, ContextScopePutsTheCallersContextBack) {
  for (CUcontext mine : {static_cast<CUcontext>(nullptr), primary_context(0), primary_context(1)}) {
    check(driver().cuCtxSetCurrent(mine), "cuCtxSetCurrent");
    {
      const ContextScope outer(1);
      const ContextScope inner(0);
      CUdevice device = -1;
      check(driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
      EXPECT_EQ(device, 0);
    }
    CUcontext now = nullptr;
    check(driver().cuCtxGetCurrent(&now), "cuCtxGetCurrent");
    EXPECT_EQ(now, mine == nullptr && is_hip() ? primary_context(0) : mine);
  }
  EXPECT_THROW(ContextScope{kDevices}, InvalidArgument);
  EXPECT_THROW(ContextScope{-1}, InvalidArgument);
  EXPECT_THROW(primary_context(100000), InvalidArgument);
}

TEST_F(VmmTest, StreamsAndEventsAreOwned) {
  {
    Stream stream = Stream::create();
    Event event = Event::create();
    event.record(stream);
    event.synchronize();
    const Stream moved = std::move(stream);
    EXPECT_EQ(Live::now().streams, 1u);
    EXPECT_EQ(Live::now().events, 1u);
  }
  EXPECT_EQ(Live::now(), Live{});
}

TEST_F(VmmTest, ARequestWithoutADeviceIsRefused) {
  for (const int device : {-1, kMaxDevices, kMaxDevices + 7}) {
    EXPECT_THROW(granularity(device), InvalidArgument) << device;
    EXPECT_THROW(is_rdma_capable(device), InvalidArgument) << device;
    EXPECT_THROW(primary_context(device), InvalidArgument) << device;
  }
}

TEST_F(VmmTest, ADriverErrorNamesCallCodeAndArguments) {
  try {
    check(CUDA_ERROR_INVALID_VALUE, "cuMemMap", "ptr=0x1");
    FAIL() << "nothing was thrown";
  } catch (const DriverError& error) {
    EXPECT_STREQ(error.what(),
                 (std::string(name_in_use("cuMemMap")) + "(ptr=0x1) failed with CUDA_ERROR_INVALID_VALUE (1)").c_str());
  }
  EXPECT_STREQ(result_name(static_cast<CUresult>(123456)), "an error without a name");
}

}  // namespace
}  // namespace ebbtide::testing
