// What becomes of backups that outlive their use: the device may still write into them, or somebody looks at them.
#include <gtest/gtest.h>

#include "base/error.h"
#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

constexpr int kOther = 999;

class BackupLifetime : public CoreTest {
 protected:
  uint64_t host_bytes_of_backups() { return saver().host_budget.held_bytes() - saver().engines.held_bytes(); }
  uint64_t pinned_bytes_of_backups() { return saver().pinned_budget.held_bytes() - saver().engines.held_bytes(); }
};

TEST_F(BackupLifetime, APinnedBackupThatTheDeviceMayStillWriteIntoStaysInTheBooks) {
  saver().skip.clean = saver().skip.constant = false;
  const CUdeviceptr address = alloc("w", kChunk, BackupKind::kPinned);
  sim().fail("cuEventSynchronize", 1, kOther, 0);
  sim().fail("cuStreamSynchronize", 1, kOther, 0);
  EXPECT_THROW(pause(), DriverError);
  sim().clear_failures();
  EXPECT_EQ(resident_bytes("w"), kChunk);
  saver().free(address);
  saver().engines.trim();
  EXPECT_EQ(Live::now().registered_ranges, 2u) << "the ring and the backup";
  EXPECT_EQ(host_bytes_of_backups(), kChunk);
  EXPECT_EQ(pinned_bytes_of_backups(), kChunk);
  saver().free(alloc("w", kChunk, BackupKind::kPinned));
  EXPECT_EQ(host_bytes_of_backups(), kChunk);
}

}  // namespace
}  // namespace ebbtide::testing
