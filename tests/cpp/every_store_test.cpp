// The contract of every store: bytes come back with any alignment and any number of threads, and the view shows them.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <thread>

#include "base/error.h"
#include "core_fixture.h"
#include "driver/context.h"
#include "store_fixture.h"

namespace ebbtide::testing {
namespace {

// Not a multiple of any unit, so that the last piece is never whole.
constexpr size_t kSize = kMiB + 3 * 4096 + 1234;

class EveryStore : public CoreTest, public ::testing::WithParamInterface<BackupKind> {
 protected:
  EveryStore() : scope_(0), backup_(open_backup(GetParam(), kSize)) {}
  ~EveryStore() override { backup_.reset(); }
  bool shows(const std::vector<std::byte>& bytes) { return std::memcmp(backup_->view(), bytes.data(), kSize) == 0; }

  const ContextScope scope_;
  const DiskDirectory directory_;
  std::unique_ptr<Backup> backup_;
};

struct Part {
  size_t offset;
  size_t size_bytes;
};

// The whole backup, cut at random places.
std::vector<Part> random_parts(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::set<size_t> cuts = {0, kSize};
  while (cuts.size() < 60) cuts.insert(random() % kSize);
  // Some cuts are on boundaries, so that whole blocks lie beside parts of blocks.
  for (int cut = 0; cut < 30; ++cut) cuts.insert(random() % kSize / 4096 * 4096);
  std::vector<Part> parts;
  for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) parts.push_back({*cut, *std::next(cut) - *cut});
  std::shuffle(parts.begin(), parts.end(), random);
  return parts;
}

TEST_P(EveryStore, ThreadsWriteAndReadNeighbouringRangesOfAnySizeAndAlignment) {
  constexpr size_t kThreads = 4;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    const std::vector<std::byte> content = random_bytes(kSize, seed);
    const std::vector<Part> parts = random_parts(seed);
    std::vector<int> wrong(kThreads, 0);
    std::vector<std::thread> threads;
    for (size_t thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        for (size_t index = thread; index < parts.size(); index += kThreads) {
          const auto [offset, size] = parts[index];
          backup_->write(offset, content.data() + offset, size);
          std::vector<std::byte> back(size + 7);
          backup_->read(offset, back.data() + 7, size);
          wrong[thread] += std::memcmp(back.data() + 7, content.data() + offset, size) != 0;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
    EXPECT_EQ(read_all(*backup_, kSize), content);
    EXPECT_TRUE(shows(content)) << "the earlier view shows later writes";
  }
}

TEST_P(EveryStore, AlignedPiecesGoStraight) {
  const auto aligned = open_backup(BackupKind::kRam, kSize);
  const std::vector<std::byte> content = random_bytes(kSize, 9);
  std::byte* const bytes = aligned->view();
  std::memcpy(bytes, content.data(), kSize);
  for (size_t offset = 0; offset < kSize; offset += 65536) {
    backup_->write(offset, bytes + offset, std::min<size_t>(65536, kSize - offset));
  }
  std::memset(bytes, 0, kSize);
  for (size_t offset = 0; offset < kSize; offset += 65536) {
    backup_->read(offset, bytes + offset, std::min<size_t>(65536, kSize - offset));
  }
  EXPECT_EQ(std::memcmp(bytes, content.data(), kSize), 0);
}

TEST_P(EveryStore, TheViewIsOneRangeForEachCaller) {
  const std::vector<std::byte> content = random_bytes(kSize, 5);
  backup_->write(0, content.data(), kSize);
  std::vector<const std::byte*> views(4);
  std::vector<std::thread> threads;
  for (const std::byte*& view : views) threads.emplace_back([&] { view = backup_->view(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<const std::byte*>(views.begin(), views.end()).size(), 1u);
  EXPECT_TRUE(shows(content));
}

TEST_P(EveryStore, WritesIntoTheViewAreReadAndTheReverse) {
  std::vector<std::byte> content = random_bytes(kSize, 10);
  backup_->write(0, content.data(), kSize);
  std::byte* const writable = backup_->view();
  EXPECT_EQ(std::memcmp(writable, content.data(), kSize), 0);
  for (const uint64_t seed : {11, 12}) {
    const std::vector<std::byte> edit = random_bytes(300000, seed);
    std::memcpy(writable + 5000, edit.data(), edit.size());
    std::memcpy(content.data() + 5000, edit.data(), edit.size());
    EXPECT_EQ(read_all(*backup_, kSize), content);
    EXPECT_TRUE(shows(content));
    // Beside bytes that were just edited, within one block.
    backup_->write(5000 - 100, edit.data(), 100);
    std::memcpy(content.data() + 5000 - 100, edit.data(), 100);
    EXPECT_EQ(std::memcmp(writable, content.data(), kSize), 0);
    EXPECT_EQ(read_all(*backup_, kSize), content);
  }
}

TEST_P(EveryStore, PopulatingAndSealingKeepTheContent) {
  const std::vector<std::byte> content = random_bytes(kSize, 6);
  backup_->write(0, content.data(), kSize);
  backup_->populate(0, kSize);
  backup_->populate(5000, 70001);
  EXPECT_EQ(backup_->direct(), nullptr);
  backup_->seal();
  EXPECT_EQ(backup_->direct() != nullptr, GetParam() == BackupKind::kPinned);
  EXPECT_EQ(read_all(*backup_, kSize), content);
  backup_->write(77, content.data(), 300000);
  EXPECT_EQ(std::memcmp(backup_->view() + 77, content.data(), 300000), 0);
}

TEST_P(EveryStore, DiscardedPagesCanBeWrittenAgainAndTheirNeighboursStay) {
  const std::vector<std::byte> before = random_bytes(kSize, 7);
  const std::vector<std::byte> after = random_bytes(kSize, 8);
  constexpr Part kGone = {4097, 300000};
  backup_->write(0, before.data(), kSize);
  backup_->discard(kGone.offset, kGone.size_bytes);
  std::vector<std::byte> now = read_all(*backup_, kSize);
  EXPECT_EQ(std::memcmp(now.data(), before.data(), kGone.offset), 0);
  const size_t end = kGone.offset + kGone.size_bytes;
  EXPECT_EQ(std::memcmp(now.data() + end, before.data() + end, kSize - end), 0);
  backup_->write(kGone.offset, after.data(), kGone.size_bytes);
  backup_->read(kGone.offset, now.data(), kGone.size_bytes);
  EXPECT_EQ(std::memcmp(now.data(), after.data(), kGone.size_bytes), 0);
  backup_->discard(10, 20);  // less than a page: nothing can be freed
  EXPECT_EQ(std::memcmp(backup_->view(), before.data(), kGone.offset), 0);
}

TEST_P(EveryStore, TooMuchIsRefusedWithItsSize) {
  try {
    open_backup(GetParam(), 1ULL << 60);
    FAIL() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.requested_bytes, 1ULL << 60);
    EXPECT_LT(error.shortage.free_bytes, 1ULL << 60);
  }
}

TEST_P(EveryStore, NothingIsLeftBehind) {
  backup_->seal();
  backup_->view();
  backup_.reset();
  EXPECT_TRUE(directory_.is_empty());
  expect_no_leak();
}

std::string name_of(const ::testing::TestParamInfo<BackupKind>& info) {
  switch (info.param) {
    case BackupKind::kRam: return "ram";
    case BackupKind::kPinned: return "pinned";
    default: return "disk";
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryStore, ::testing::Values(BackupKind::kRam, BackupKind::kPinned, BackupKind::kDisk),
                         name_of);

TEST(StoreOf, AnUnknownStoreIsAnInvalidArgument) {
  EXPECT_THROW(require_store(BackupKind::kNone), InvalidArgument);
  EXPECT_THROW(require_store(static_cast<BackupKind>(77)), InvalidArgument);
}

}  // namespace
}  // namespace ebbtide::testing
