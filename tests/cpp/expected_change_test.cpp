// Blocks that changed before each of the last two pauses are copied before the scan is read. A wrong guess costs one
// copy.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <sstream>

#include "core_fixture.h"

namespace ebbtide::testing {
namespace {

using Calls = std::vector<std::string>;

class ExpectedChangeTest : public CoreTest {
 protected:
  ~ExpectedChangeTest() override { free_all(); }
  void free_all() {
    for (const CUdeviceptr address : allocated_) deallocate(core(), address);
    allocated_.clear();
  }
  CUdeviceptr alloc_noted(const Policy& policy, const std::vector<uint64_t>& chunk_bytes) {
    return allocated_.emplace_back(alloc_chunks("w", policy, 0, chunk_bytes));
  }
  // Memory that changed before each of the last two pauses, and again.
  CUdeviceptr alloc_changed(const Policy& policy, const std::vector<uint64_t>& chunk_bytes) {
    const CUdeviceptr address = alloc_noted(policy, chunk_bytes);
    size_bytes_ = 0;
    for (const uint64_t bytes : chunk_bytes) size_bytes_ += bytes;
    for (seed_ = 1; seed_ <= 3; ++seed_) {
      fill(address, size_bytes_, seed_);
      pause();
      resume();
    }
    fill(address, size_bytes_, seed_);
    return address;
  }
  Verdicts verdicts(CUdeviceptr address) { return *core().registry.find(address)->verdicts; }
  // The calls of a pause that copy, look or wait.
  Calls calls_of_pause() {
    sim().clear_log();
    pause();
    std::string text(sim().log(nullptr, 0) + 1, '\0');
    sim().log(text.data(), text.size());
    const std::set<std::string> shown = {"cuLaunchKernel", "cuMemcpyDtoHAsync", "cuEventSynchronize",
                                         "cuStreamSynchronize", "cuMemUnmap"};
    Calls calls;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      if (shown.contains(line.substr(0, line.find('(')))) calls.push_back(line.substr(0, line.find('(')));
    }
    return calls;
  }
  ReportRow pause_but(const std::vector<AddressRange>& unused) {
    OperationRequest request;
    request.unused = AddressRanges(unused);
    request.unused_as_of = core().registry.leases.newest();
    return Operation::claim(core(), OperationKind::kPause, request)->commit().front().totals();
  }
  static unsigned char* bytes_at(CUdeviceptr address) { return reinterpret_cast<unsigned char*>(address); }

  std::vector<CUdeviceptr> allocated_;
  uint64_t size_bytes_ = 0;
  uint64_t seed_ = 0;
};

const Calls kCareful = {"cuLaunchKernel", "cuEventSynchronize", "cuMemcpyDtoHAsync",
                        "cuLaunchKernel", "cuEventSynchronize", "cuMemUnmap"};
// The second wait is for the scan, which was over before the copy began.
const Calls kExpecting = {"cuLaunchKernel",     "cuMemcpyDtoHAsync",  "cuLaunchKernel",
                          "cuEventSynchronize", "cuEventSynchronize", "cuMemUnmap"};

TEST_F(ExpectedChangeTest, ItIsCopiedBeforeTheFirstWait) {
  const CUdeviceptr address = alloc_noted({BackupKind::kPinned}, {kChunk});
  pause();  // makes everything that is made once
  resume();
  for (const Calls& calls : {kCareful, kCareful, kExpecting, kExpecting}) {
    fill(address, kChunk, ++seed_);
    EXPECT_EQ(calls_of_pause(), calls) << seed_;
    EXPECT_EQ(verdicts(address), Verdicts{seed_ == 1 ? Verdict::kFilled : Verdict::kChanged});
    EXPECT_EQ(resume().totals().copied, kChunk);
    EXPECT_TRUE(holds(address, kChunk, seed_));
  }
}

TEST_F(ExpectedChangeTest, AWrongGuessCostsOneCopy) {
  const CUdeviceptr address = alloc_changed({BackupKind::kPinned}, {kChunk, kChunk});
  pause();
  resume();
  bytes_at(address)[kChunk] ^= 1;  // only the second block
  const ReportRow row = pause().totals();
  EXPECT_EQ(row.copied, 2 * kChunk);
  EXPECT_EQ(row.clean, 0u);
  EXPECT_EQ(verdicts(address), (Verdicts{Verdict::kUncompared, Verdict::kChanged}));
  resume();
  const ReportRow next = pause().totals();
  EXPECT_EQ(next.copied, 0u);
  EXPECT_EQ(next.clean, 2 * kChunk);
  resume();
  bytes_at(address)[kChunk] ^= 1;
  EXPECT_TRUE(holds(address, 2 * kChunk, seed_));
}

TEST_F(ExpectedChangeTest, ABlockThatBecomesOneValueIsCopiedOnce) {
  const CUdeviceptr address = alloc_changed({BackupKind::kPinned}, {kChunk});
  std::memset(bytes_at(address), 7, kChunk);
  EXPECT_EQ(pause().totals().copied, kChunk);
  EXPECT_EQ(verdicts(address), Verdicts{Verdict::kUncompared});
  resume();
  EXPECT_EQ(bytes_at(address)[kChunk - 1], 7);
  EXPECT_EQ(pause().totals().constant, kChunk);
  resume();
  EXPECT_EQ(bytes_at(address)[0], 7);
}

TEST_F(ExpectedChangeTest, UnusedBlocksAreNotCopied) {
  const CUdeviceptr address = alloc_changed({BackupKind::kPinned}, {2 * kChunk, kChunk});
  const ReportRow row = pause_but({{address, kChunk}});
  EXPECT_EQ(row.copied, 2 * kChunk);
  EXPECT_EQ(row.unused, kChunk);
  EXPECT_EQ(verdicts(address), (Verdicts{Verdict::kUnused, Verdict::kChanged, Verdict::kChanged}));
}

// Nothing is copied of it, behind which its scan would be over.
TEST_F(ExpectedChangeTest, AChunkOfWhichNothingIsUsedStaysUntilItsScanIsOver) {
  for (const bool is_all : {false, true}) {
    const CUdeviceptr address = alloc_changed({BackupKind::kPinned}, {kChunk, kChunk});
    fill(address + kChunk, kChunk, 9);
    const ReportRow row = pause_but({{address, is_all ? 2 * kChunk : kChunk}});
    EXPECT_EQ(row.unused, is_all ? 2 * kChunk : kChunk);
    EXPECT_EQ(driver().cuCtxSynchronize(), CUDA_SUCCESS);
    resume();
    EXPECT_TRUE(is_all || holds(address + kChunk, kChunk, 9));
    free_all();
  }
}

TEST_F(ExpectedChangeTest, OtherMemoryIsLookedAtFirst) {
  core().budgets.pinned.set_limit(5 * kMiB);  // for the ring, and not for the backup
  const CUdeviceptr address = alloc_changed({BackupKind::kRam, true}, {kChunk});
  EXPECT_EQ(calls_of_pause(), kCareful) << "bytes that go through the ring";
  resume();
  core().rules.skip.clean = false;
  EXPECT_NE(calls_of_pause(), kExpecting);
  resume();
  EXPECT_TRUE(holds(address, kChunk, seed_));
}

TEST_F(ExpectedChangeTest, AFailedPauseLosesNothing) {
  for (const char* const call : {"cuMemcpyDtoHAsync", "cuLaunchKernel", "cuMemUnmap"}) {
    SCOPED_TRACE(call);
    const CUdeviceptr address = alloc_changed({BackupKind::kPinned}, {kChunk});
    sim().clear_log();
    sim().fail(call, call == std::string("cuLaunchKernel") ? 2 : 1, 999, 1);
    EXPECT_THROW(pause(), Error);
    sim().clear_failures();
    EXPECT_TRUE(holds(address, kChunk, seed_));
    EXPECT_EQ(pause().totals().copied, kChunk);
    resume();
    EXPECT_TRUE(holds(address, kChunk, seed_));
    free_all();
  }
}

}  // namespace
}  // namespace ebbtide::testing
