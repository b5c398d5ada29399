// The decision of the last pause on each block, which answers why it copied so much.
#include <gtest/gtest.h>

#include <cstring>

#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

class VerdictsTest : public CoreTest {
 protected:
  CUdeviceptr alloc_retained(uint64_t size_bytes) {
    return allocate(core(), core().registry.tag("w"), Policy{BackupKind::kRam, true}, 0, size_bytes);
  }
  Verdicts verdicts(CUdeviceptr address) {
    const auto found = core().registry.find(address)->verdicts;
    return found == nullptr ? Verdicts{} : *found;
  }
  static unsigned char* bytes_at(CUdeviceptr address) { return reinterpret_cast<unsigned char*>(address); }
};

TEST_F(VerdictsTest, EachBlockIsCopiedChangedCleanUnusedOrConstant) {
  const CUdeviceptr address = alloc_retained(5 * kChunk);
  EXPECT_TRUE(verdicts(address).empty());
  fill(address, 3 * kChunk, 1);
  fill(address + 4 * kChunk, kChunk, 2);
  pause();
  EXPECT_EQ(verdicts(address),
            (Verdicts{Verdict::kCopied, Verdict::kCopied, Verdict::kCopied, Verdict::kConstant, Verdict::kCopied}));
  resume();
  bytes_at(address)[kChunk] ^= 1;
  bytes_at(address)[4 * kChunk - 1] = 9;  // constant no more
  OperationRequest request;
  request.unused = AddressRanges({{address + 2 * kChunk, kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  const ReportRow row = Operation::claim(core(), OperationKind::kPause, request)->commit().front().totals();
  EXPECT_EQ(verdicts(address),
            (Verdicts{Verdict::kClean, Verdict::kChanged, Verdict::kUnused, Verdict::kFilled, Verdict::kClean}));
  EXPECT_EQ(row.copied, 2 * kChunk);
  EXPECT_EQ(row.clean, 2 * kChunk);
  const ReportRow back = resume().totals();
  EXPECT_EQ(back.unused, kChunk);
  EXPECT_EQ(back.constant, 0u);
  EXPECT_EQ(back.copied, 4 * kChunk);
  EXPECT_EQ(verdicts(address)[1], Verdict::kChanged) << "the answer stays until the next pause";
}

TEST_F(VerdictsTest, NothingIsComparedWhereThatIsOff) {
  const CUdeviceptr address = alloc_retained(kChunk);
  fill(address, kChunk, 1);
  core().rules.skip.clean = false;
  for (const Verdict verdict : {Verdict::kCopied, Verdict::kUncompared}) {
    pause();
    EXPECT_EQ(verdicts(address), Verdicts{verdict});
    resume();
  }
  core().rules.skip.clean = true;
  pause();
  EXPECT_EQ(verdicts(address), Verdicts{Verdict::kCopied}) << "of the earlier copy there is no digest";
}

TEST_F(VerdictsTest, WhatWasOneValueAndIsSoAgainIsConstant) {
  const CUdeviceptr address = alloc_retained(kChunk);
  pause();
  resume();
  fill(address, kChunk, 1);
  pause();
  EXPECT_EQ(verdicts(address), Verdicts{Verdict::kFilled});
  resume();
  pause();
  EXPECT_EQ(verdicts(address), Verdicts{Verdict::kClean}) << "one change is no reason to expect another";
  resume();
  std::memset(bytes_at(address), 0, kChunk);
  pause();
  EXPECT_EQ(verdicts(address), Verdicts{Verdict::kConstant});
}

TEST_F(VerdictsTest, WhatDropsTheContentSaysSoAndATrimForgets) {
  const CUdeviceptr address = alloc_retained(2 * kChunk);
  fill(address, 2 * kChunk, 1);
  pause();
  resume();
  OperationRequest request;
  request.backup = BackupKind::kNone;
  Operation::claim(core(), OperationKind::kPause, request)->commit();
  EXPECT_EQ(verdicts(address), (Verdicts{Verdict::kDropped, Verdict::kDropped}));
  resume();
  OperationRequest trim;
  trim.tags.addresses = {address};
  Operation::claim(core(), OperationKind::kTrim, trim)->commit();
  EXPECT_TRUE(verdicts(address).empty());
}

TEST_F(VerdictsTest, WhatLiesOnTheHostIsLeftThere) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk});
  fill(address, 2 * kChunk, 1);
  pause();
  resume();
  Operation::claim(core(), OperationKind::kDemote, {})->commit();
  pause();
  EXPECT_EQ(verdicts(address), (Verdicts{Verdict::kOnHost, Verdict::kOnHost}));
}

TEST_F(VerdictsTest, APauseThatFailsBeforeItsFirstByteChangesNone) {
  const CUdeviceptr address = alloc_retained(kChunk);
  fill(address, kChunk, 1);
  pause();
  resume();
  fill(address, kChunk, 2);
  sim().fail("cuMemUnmap", 1, 999, 1);
  EXPECT_THROW(pause(), Error);
  sim().clear_failures();
  EXPECT_EQ(verdicts(address), Verdicts{Verdict::kCopied});
}

TEST_F(VerdictsTest, WhatWasUnusedHasNoEarlierCopy) {
  const CUdeviceptr address = alloc_retained(2 * kChunk);
  fill(address, 2 * kChunk, 1);
  OperationRequest request;
  request.unused = AddressRanges({{address + kChunk, kChunk}});
  request.unused_as_of = core().registry.leases.newest();
  Operation::claim(core(), OperationKind::kPause, request)->commit();
  resume();
  fill(address + kChunk, kChunk, 2);
  core().rules.skip.clean = false;
  pause();
  EXPECT_EQ(verdicts(address), (Verdicts{Verdict::kUncompared, Verdict::kCopied}));
}

TEST_F(VerdictsTest, WhatAFailedPauseLeftOnTheDeviceKeepsItsVerdicts) {
  core().rules.shared_handle_bytes = 0;  // each chunk leaves by a call of its own, after a resume as well
  for (const BackupKind kind : {BackupKind::kRam, BackupKind::kNone}) {
    const CUdeviceptr address = alloc_chunks("w", kind, 0, {kChunk, kChunk, kChunk, kChunk});
    fill(address, 4 * kChunk, 1);
    for (const Verdict before : {Verdict::kNone, kind == BackupKind::kRam ? Verdict::kCopied : Verdict::kDropped}) {
      sim().fail("cuMemUnmap", 3, 999, 1);
      EXPECT_THROW(pause(), Error);
      sim().clear_failures();
      const auto allocation = core().registry.find(address);
      const Verdicts found = verdicts(address);
      size_t stayed = 0;
      for (const Chunk& chunk : allocation->chunks) {
        if (!chunk.is_resident()) continue;
        ++stayed;
        EXPECT_EQ(found[chunk.first_block()], before);
      }
      EXPECT_GT(stayed, 0u);
      pause();
      resume();
    }
    ebbtide::deallocate(core(), address);
  }
}

// Of the blocks that left before the failure, the first pause's verdicts stay.
TEST_F(VerdictsTest, APauseThatFinishesAnotherAddsToItsVerdicts) {
  const CUdeviceptr address = alloc_chunks("w", BackupKind::kRam, 0, {kChunk, kChunk, kChunk, kChunk});
  fill(address, 4 * kChunk, 1);
  sim().fail("cuMemUnmap", 3, 999, 1);
  EXPECT_THROW(pause(), Error);
  sim().clear_failures();
  EXPECT_TRUE(is_partial("w"));
  pause();
  EXPECT_EQ(verdicts(address), (Verdicts{Verdict::kCopied, Verdict::kCopied, Verdict::kCopied, Verdict::kCopied}));
}

}  // namespace
}  // namespace ebbtide::testing
