// Content that could deceive the decision to skip a block. After each change, however small, the exact bytes come back
// (invariant 2).
#include <cstring>
#include <iterator>

#include "base/error.h"
#include "hooked_backup.h"
#include "moves_world.h"

namespace ebbtide::testing {
namespace {

constexpr size_t kBlocks = 4;
constexpr size_t kBytes = kBlocks * kChunk;

class MovesContent : public MovesWorld, public ::testing::WithParamInterface<Policy> {
 protected:
  MovesContent() {
    address_ = alloc_chunks("w", GetParam(), 0, {kChunk, 2 * kChunk, kChunk});
    bytes_ = reinterpret_cast<unsigned char*>(address_);
  }
  ~MovesContent() override { deallocate(core(), address_); }

  // Pauses, resumes, and compares every byte.
  ReportRow expect_back(const std::string& what) {
    const std::vector<unsigned char> wanted(bytes_, bytes_ + kBytes);
    const ReportRow row = pause().totals();
    EXPECT_EQ(row.copied + row.skipped(), kBytes) << what;
    resume();
    EXPECT_EQ(std::memcmp(bytes_, wanted.data(), kBytes), 0) << what;
    return row;
  }
  void fill_words(size_t block, const std::vector<uint32_t>& words) {
    for (size_t at = 0; at < kChunk / 4; ++at)
      std::memcpy(bytes_ + block * kChunk + 4 * at, &words[at % words.size()], 4);
  }

  const DiskDirectory directory_;
  CUdeviceptr address_ = 0;
  unsigned char* bytes_ = nullptr;
};

TEST_P(MovesContent, OneBitAtAnyEdgeIsSeen) {
  fill(address_, kBytes, 1);
  expect_back("first");
  const size_t offsets[] = {0, kChunk - 1, 15, 16, kChunk / 2 - 1, kChunk - 16};
  for (size_t round = 0; round < std::size(offsets); ++round) {
    bytes_[round % kBlocks * kChunk + offsets[round]] ^= round % 2 == 0 ? 0x80 : 0x01;
    const uint64_t wanted = GetParam().retain ? kChunk : kBytes;
    EXPECT_EQ(expect_back("byte " + std::to_string(offsets[round])).copied, wanted);
  }
}

TEST_P(MovesContent, ABlockOfNearlyOneValueIsNotConstant) {
  std::memset(bytes_, 0, kBytes);
  EXPECT_EQ(expect_back("all zero").constant, kBytes);
  for (const size_t offset : {size_t{0}, size_t{15}, size_t{16}, kChunk - 17, kChunk - 1}) {
    std::memset(bytes_, 0, kBytes);
    bytes_[offset] = 1;
    std::memset(bytes_ + kChunk, 0x5a, kChunk);
    bytes_[kChunk + offset] = 0x5b;
    EXPECT_EQ(expect_back("all but one byte").constant, 2 * kChunk);
    EXPECT_EQ(bytes_[kChunk + offset], 0x5b);
  }
  // A value of 16 bytes, and a pattern that repeats only after 32.
  fill_words(0, {1, 2, 3, 4});
  fill_words(1, {1, 2, 3, 4, 1, 2, 3, 5});
  fill_words(2, {0, 0, 0, 0x80000000});  // negative zeros
  std::memset(bytes_ + 3 * kChunk, 0, kChunk);
  EXPECT_EQ(expect_back("periods").constant, 3 * kChunk);
}

TEST_P(MovesContent, NaNsKeepTheirBits) {
  fill_words(0, {0x7fc00000});                          // quiet
  fill_words(1, {0x7f800001, 0xffc12345});              // signalling, and with a payload
  fill_words(2, {0xffffffff});                          // in every format
  fill_words(3, {0x7ff00000, 0x7ff80000, 0x7e007e00});  // halves of doubles, and half precision
  expect_back("first");
  fill_words(0, {0x7fc00001});
  fill_words(1, {0x7f800001, 0xffc12344});
  expect_back("other payloads, which compare as unequal and equal alike");
  EXPECT_EQ(expect_back("unchanged").copied, GetParam().retain ? 0 : kChunk);
}

// The store still holds the bytes of two pauses ago for blocks that were constant meanwhile.
TEST_P(MovesContent, ChangesThatComeAndGoAreNeverTakenForTheStoredBytes) {
  for (const uint64_t seed : {1, 2, 1, 1}) {
    fill(address_, kBytes, seed);
    expect_back("seed " + std::to_string(seed));
    std::memset(bytes_, static_cast<int>(seed), kChunk);
    std::memcpy(bytes_ + kChunk, bytes_ + 2 * kChunk, kChunk);  // makes two blocks alike
    expect_back("half of one value");
    fill(address_, kChunk, seed);
    expect_back("as it was");
  }
}

const Policy kPolicies[] = {
    {BackupKind::kRam, true}, {BackupKind::kRam, false}, {BackupKind::kPinned, true}, {BackupKind::kDisk, true}};
std::string name_of(const ::testing::TestParamInfo<Policy>& info) {
  const char* const kinds[] = {"none", "ram", "pinned", "disk"};
  return std::string(kinds[static_cast<int>(info.param.backup)]) + (info.param.retain ? "_retained" : "");
}
INSTANTIATE_TEST_SUITE_P(Stores, MovesContent, ::testing::ValuesIn(kPolicies), name_of);

// A program should not write to memory that is being paused. If it does, a write between the digest and the copy comes
// back, and a later one is lost. The next pause treats neither as clean.
TEST_F(MovesWorld, AWriteBetweenDigestAndCopyIsNotTakenForClean) {
  for (const size_t written : {size_t{0}, size_t{5}}) {  // already in the ring; not copied yet
    const CUdeviceptr address = alloc_chunks("w", Policy{BackupKind::kRam, true}, 0, std::vector<uint64_t>(6, kChunk));
    for (size_t chunk = 0; chunk < 6; ++chunk) fill(address + chunk * kChunk, kChunk, chunk);
    bool is_first = true;
    const auto write_once = [&] {
      if (std::exchange(is_first, false)) fill(address + written * kChunk, kChunk, 77);
    };
    const auto allocation = core().registry.find(address);
    core().registry.replace(
        allocation->stored,
        std::make_shared<BackupRecord>(BackupKind::kRam,
                                       std::make_unique<HookedBackup>(6 * kChunk, write_once, nullptr), 6 * kChunk));
    EXPECT_EQ(pause().totals().copied, 6 * kChunk);
    resume();
    EXPECT_TRUE(holds(address + written * kChunk, kChunk, written == 0 ? 0 : 77));
    const ReportRow next = pause().totals();
    EXPECT_EQ(next.copied, kChunk) << "its digest says nothing";
    EXPECT_EQ(next.clean, 5 * kChunk);
    resume();
    EXPECT_EQ(pause().totals().clean, 6 * kChunk);
    resume();
    EXPECT_TRUE(holds(address + written * kChunk, kChunk, written == 0 ? 0 : 77));
    for (const size_t chunk : {1, 2, 3, 4}) EXPECT_TRUE(holds(address + chunk * kChunk, kChunk, chunk));
    deallocate(core(), address);
  }
  expect_nothing_left();
}

}  // namespace
}  // namespace ebbtide::testing
