// The driver refuses access to peers: the device itself continues, and the refused access is tried again.
#include "base/error.h"
#include "core/allocate/allocator.h"
#include "core/allocate/build.h"
#include "core/operation/pending.h"
#include "driver/peers.h"
#include "peers_world.h"

namespace ebbtide::testing {
namespace {

class RefusedPeersTest : public PeersWorld {};

TEST_F(RefusedPeersTest, AMappingThatThePeersAreRefusedIsTheDevicesAlone) {
  ::testing::internal::CaptureStderr();
  ::setenv("EBBTIDE_LOG", "warning", 1);
  sim().fail("cuMemSetAccess", 1, kOther, 1);  // for both devices
  sim().fail("cuMemSetAccess", 3, kOther, 1);  // for the peer
  const CUdeviceptr address = alloc("a", kChunk);
  sim().clear_failures();
  const std::string said = ::testing::internal::GetCapturedStderr();
  ::setenv("EBBTIDE_LOG", "error", 1);
  EXPECT_NE(said.find("peers of a device failed with"), std::string::npos) << said;
  EXPECT_TRUE(is_usable_by(0, address));
  EXPECT_FALSE(is_usable_by(1, address));
  alloc("a", kChunk);
  EXPECT_FALSE(is_usable_by(1, address)) << "an allocation does not ask again and again";
  core().registry.leases.close(open_lease(core(), "a", "somebody").id);
  EXPECT_TRUE(is_usable_by_all(address));
}

TEST_F(RefusedPeersTest, ARefusalIsNotForgottenWhereAnOperationHoldsTheMemory) {
  sim().fail("cuMemSetAccess", 1, kOther, 1);  // for both devices
  sim().fail("cuMemSetAccess", 3, kOther, 0);  // for the peer
  const CUdeviceptr address = alloc("a", kChunk);
  auto operation = claim(OperationKind::kPrepare, {"a"});
  EXPECT_FALSE(is_usable_by(1, address));
  core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id);
  operation.reset();
  sim().clear_failures();
  EXPECT_FALSE(is_usable_by(1, address));
  core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id);
  EXPECT_TRUE(is_usable_by_all(address));
}

// The state of a thread between mapping and registering while another thread visits all allocations.
TEST_F(RefusedPeersTest, ARefusalIsNotForgottenWhereTheMemoryIsNotRegisteredYet) {
  core().peers.refresh(false);
  sim().fail("cuMemSetAccess", 1, kOther, 1);  // for both devices
  sim().fail("cuMemSetAccess", 3, kOther, 1);  // for the peer
  std::vector<HostPool::Handle> none;
  std::shared_ptr<Allocation> allocation =
      build_allocation(core(), {core().registry.tag("a"), {BackupKind::kRam}, 0, kChunk}, none);
  sim().clear_failures();
  core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id);
  const CUdeviceptr address = allocation->address();
  core().registry.insert(std::move(allocation));
  EXPECT_FALSE(is_usable_by(1, address));
  core().registry.leases.close(open_lease(core(), "elsewhere", "somebody").id);
  EXPECT_TRUE(is_usable_by_all(address));
  deallocate(core(), address);
}

TEST_F(RefusedPeersTest, AMappingThatIsRefusedAtAllIsNone) {
  sim().fail("cuMemSetAccess", 1, kOther, 2);
  EXPECT_THROW(alloc("a", kChunk), DriverError);
  sim().clear_failures();
  expect_nothing_left();
}

TEST_F(RefusedPeersTest, OnlyWhoAskedIsToldOfARefusal) {
  start_with_one();
  spill("w", kSplitRam, kChunk, kChunk);
  set_alive(1, true);
  sim().fail("cuMemSetAccess", 1, kOther, 1);  // for the first chunk; the second gets it
  try {
    core().peers.enable(1);
    ADD_FAILURE() << "no error";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.code, kOther);
  }
  sim().clear_failures();
  EXPECT_FALSE(is_usable_by(1, items_[0].address));
  EXPECT_TRUE(is_usable_by(0, items_[0].address));
  core().peers.enable(1);
  EXPECT_TRUE(is_usable_by_all(items_[0].address));
}

}  // namespace
}  // namespace ebbtide::testing
