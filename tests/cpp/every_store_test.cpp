// The contract of every store: bytes come back with any number of threads, and the view shows them.
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

constexpr size_t kPage = 4096;
// Not a multiple of any larger unit, so that the last piece is never whole.
constexpr size_t kSize = kMiB + 3 * kPage;

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
  while (cuts.size() < 60) cuts.insert(random() % kSize / kPage * kPage);
  std::vector<Part> parts;
  for (auto cut = cuts.begin(); std::next(cut) != cuts.end(); ++cut) parts.push_back({*cut, *std::next(cut) - *cut});
  std::shuffle(parts.begin(), parts.end(), random);
  return parts;
}

TEST_P(EveryStore, ThreadsWriteAndReadNeighbouringRanges) {
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
          write_at(*backup_, offset, content.data() + offset, size);
          const std::vector<std::byte> back = read_at(*backup_, offset, size);
          wrong[thread] += std::memcmp(back.data(), content.data() + offset, size) != 0;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(kThreads, 0));
    EXPECT_EQ(read_all(*backup_, kSize), content);
    EXPECT_TRUE(shows(content)) << "the earlier view shows later writes";
  }
}

TEST_P(EveryStore, TheViewIsOneRangeForEachCaller) {
  const std::vector<std::byte> content = random_bytes(kSize, 5);
  write_all(*backup_, content);
  std::vector<const std::byte*> views(4);
  std::vector<std::thread> threads;
  for (const std::byte*& view : views) threads.emplace_back([&] { view = backup_->view(); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(std::set<const std::byte*>(views.begin(), views.end()).size(), 1u);
  EXPECT_TRUE(shows(content));
}

TEST_P(EveryStore, WritesIntoTheViewAreReadAndTheReverse) {
  std::vector<std::byte> content = random_bytes(kSize, 10);
  write_all(*backup_, content);
  std::byte* const writable = backup_->view();
  EXPECT_EQ(std::memcmp(writable, content.data(), kSize), 0);
  for (const uint64_t seed : {11, 12}) {
    const std::vector<std::byte> edit = random_bytes(300000, seed);
    std::memcpy(writable + 5000, edit.data(), edit.size());
    std::memcpy(content.data() + 5000, edit.data(), edit.size());
    EXPECT_EQ(read_all(*backup_, kSize), content);
    EXPECT_TRUE(shows(content));
    // Beside the page that was just edited.
    write_at(*backup_, 0, edit.data(), kPage);
    std::memcpy(content.data(), edit.data(), kPage);
    EXPECT_EQ(std::memcmp(writable, content.data(), kSize), 0);
    EXPECT_EQ(read_all(*backup_, kSize), content);
  }
}

TEST_P(EveryStore, PopulatingAndSealingKeepTheContent) {
  const std::vector<std::byte> content = random_bytes(kSize, 6);
  write_all(*backup_, content);
  backup_->populate(0, kSize);
  backup_->populate(5000, 70001);
  EXPECT_EQ(backup_->direct(), nullptr);
  backup_->seal();
  EXPECT_EQ(backup_->direct() != nullptr, GetParam() == BackupKind::kPinned);
  EXPECT_EQ(read_all(*backup_, kSize), content);
  write_at(*backup_, kPage, content.data(), 70 * kPage);
  EXPECT_EQ(std::memcmp(backup_->view() + kPage, content.data(), 70 * kPage), 0);
}

TEST_P(EveryStore, DiscardedPagesCanBeWrittenAgainAndTheirNeighboursStay) {
  const std::vector<std::byte> before = random_bytes(kSize, 7);
  const std::vector<std::byte> after = random_bytes(kSize, 8);
  constexpr Part kGone = {4097, 300000};
  write_all(*backup_, before);
  backup_->discard(kGone.offset, kGone.size_bytes);
  std::vector<std::byte> now = read_all(*backup_, kSize);
  EXPECT_EQ(std::memcmp(now.data(), before.data(), kGone.offset), 0);
  const size_t end = kGone.offset + kGone.size_bytes;
  EXPECT_EQ(std::memcmp(now.data() + end, before.data() + end, kSize - end), 0);
  constexpr Part kAgain = {2 * kPage, 72 * kPage};
  write_at(*backup_, kAgain.offset, after.data(), kAgain.size_bytes);
  now = read_at(*backup_, kAgain.offset, kAgain.size_bytes);
  EXPECT_EQ(std::memcmp(now.data(), after.data(), kAgain.size_bytes), 0);
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
