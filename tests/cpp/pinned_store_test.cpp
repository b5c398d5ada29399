// The pinned store: refusals, and memory that the driver does not unpin.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <thread>
#include <vector>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "driver/stream.h"
#include "store/store.h"
#include "vmm/deferred_undos.h"

namespace ebbtide::testing {
namespace {

constexpr int kDeinitialized = 4;
constexpr int kNotSupported = 801;

class PinnedStoreTest : public CoreTest {
 protected:
  PinnedStoreTest() : scope_(0) {}
  static std::unique_ptr<Backup> open() { return open_backup(BackupKind::kPinned, kChunk); }
  static uint64_t pinned_count() { return Live::now().registered_ranges; }
  static bool is_mapped(const std::byte* bytes) {
    return ::msync(const_cast<std::byte*>(bytes), kChunk, MS_ASYNC) == 0 || errno != ENOMEM;
  }
  const ContextScope scope_;
};

TEST_F(PinnedStoreTest, SealingPinsAllOfItOnceAndTheEndUnpins) {
  auto backup = open();
  const std::byte* view = backup->view();
  EXPECT_EQ(reinterpret_cast<uintptr_t>(view) % (2 * kMiB), 0u);
  EXPECT_EQ(backup->direct(), nullptr);
  EXPECT_EQ(pinned_count(), 0u);
  backup->seal();
  EXPECT_EQ(backup->direct(), view);
  EXPECT_EQ(pinned_count(), 1u);
  backup->discard(0, kChunk);
  EXPECT_EQ(backup->direct(), view);
  // The copy engine can access all of it.
  const Reservation range = Reservation::reserve(kChunk);
  const PhysicalMemory memory = PhysicalMemory::create_on_device(kChunk, 0);
  const Mapping mapping = Mapping::map(range.address(), memory);
  fill(range.address(), kChunk, 3);
  const Stream stream = Stream::create();
  check(driver().cuMemcpyDtoHAsync(backup->direct(), range.address(), kChunk, stream.get()), "cuMemcpyDtoHAsync");
  stream.synchronize();
  EXPECT_TRUE(holds(reinterpret_cast<CUdeviceptr>(view), kChunk, 3));
  backup.reset();
  EXPECT_EQ(pinned_count(), 0u);
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_FALSE(is_mapped(view));
}

TEST_F(PinnedStoreTest, WhatTheDeviceMayStillWriteIntoIsNeverGivenBack) {
  auto backup = open();
  backup->seal();
  const std::byte* view = backup->view();
  backup->abandon();
  EXPECT_EQ(backup->direct(), view) << "until its owner goes nothing changes";
  backup.reset();
  EXPECT_EQ(pinned_count(), 1u);
  EXPECT_TRUE(is_mapped(view));
}

TEST_F(PinnedStoreTest, ABackupInRamThatIsPinnedKeepsItsPages) {
  const auto backup = open_backup(BackupKind::kRam, kChunk);
  const std::vector<std::byte> bytes(kChunk, std::byte{5});
  backup->write(0, bytes.data(), kChunk);
  ASSERT_TRUE(backup->try_pin());
  EXPECT_EQ(backup->direct(), backup->view());
  backup->discard(0, kChunk);
  EXPECT_EQ(std::memcmp(backup->view(), bytes.data(), kChunk), 0) << "the device would see other pages";
  EXPECT_TRUE(backup->try_pin()) << "it is";
  EXPECT_EQ(pinned_count(), 1u);
}

TEST_F(PinnedStoreTest, ARefusalIsAStoreErrorThatSaysWhatToDoAndLeavesThePlainMemory) {
  for (const int code : {kOutOfMemory, kNotSupported, kOther}) {
    const auto backup = open();
    sim().fail("cuMemHostRegister", 1, code, 1);
    try {
      backup->seal();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const StoreError& error) {
      EXPECT_EQ(error.shortage.requested_bytes, kChunk);
      const std::string text = error.what();
      EXPECT_NE(text.find(result_name(static_cast<CUresult>(code))), std::string::npos) << text;
      EXPECT_NE(text.find("use ram backups"), std::string::npos) << text;
    }
    sim().clear_failures();
    EXPECT_EQ(backup->direct(), nullptr);
    const std::byte byte{42};
    backup->write(5, &byte, 1);
    EXPECT_EQ(backup->view()[5], byte);
    EXPECT_EQ(pinned_count(), 0u);
    backup->seal();  // a second attempt is allowed if the first did nothing
    EXPECT_NE(backup->direct(), nullptr);
  }
  expect_no_leak();
}

TEST_F(PinnedStoreTest, MemoryThatCantBeUnpinnedStaysMappedUntilItIs) {
  auto backup = open();
  backup->seal();
  const std::byte* view = backup->view();
  sim().fail("cuMemHostUnregister", 1, kOther, 2);
  backup.reset();
  EXPECT_EQ(deferred_undos::count(), 1u);
  EXPECT_EQ(deferred_undos::held_bytes(0), 0u) << "host memory is no device memory";
  EXPECT_TRUE(is_mapped(view));
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 1u) << "it failed again";
  deferred_undos::retry(false);
  EXPECT_EQ(deferred_undos::count(), 1u) << "a capture may be under way";
  EXPECT_EQ(pinned_count(), 1u);
  EXPECT_TRUE(is_mapped(view));
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_FALSE(is_mapped(view));
  expect_no_leak();
}

// The end of the driver or of its context has unpinned the memory.
TEST_F(PinnedStoreTest, WhatIsPinnedNoLongerIsUnmappedAtOnce) {
  auto backup = open();
  backup->seal();
  const std::byte* view = backup->view();
  check(driver().cuMemHostUnregister(backup->direct()), "cuMemHostUnregister");
  backup.reset();
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_FALSE(is_mapped(view));
  backup = open();
  backup->seal();
  sim().fail("cuMemHostUnregister", 1, kDeinitialized, 1);
  backup.reset();
  EXPECT_EQ(deferred_undos::count(), 0u);
  restart();
}

// Also if its undo is deferred.
TEST_F(PinnedStoreTest, LimboLetsGoOfWhatIsPinnedNoLonger) {
  auto backup = open();
  backup->seal();
  std::byte* bytes = backup->direct();
  sim().fail("cuMemHostUnregister", 1, kOther, 1);
  backup.reset();
  ASSERT_EQ(deferred_undos::count(), 1u);
  check(driver().cuMemHostUnregister(bytes), "cuMemHostUnregister");
  deferred_undos::retry(true);
  EXPECT_EQ(deferred_undos::count(), 0u);
  EXPECT_FALSE(is_mapped(bytes));
}

TEST_F(PinnedStoreTest, AnyThreadMayEndIt) {
  auto backup = open();
  backup->seal();
  std::thread([&] { backup.reset(); }).join();
  EXPECT_EQ(pinned_count(), 0u);
  EXPECT_EQ(deferred_undos::count(), 0u);
}

}  // namespace
}  // namespace ebbtide::testing
