// Memory of backups that is taken ahead, by many threads or by one, and the effects of a failure.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/error.h"
#include "store/host_memory.h"
#include "store/populate.h"

namespace ebbtide {
namespace {

constexpr size_t kPage = 4096;

size_t resident_pages(const std::byte* bytes, size_t size_bytes) {
  std::vector<unsigned char> pages(size_bytes / kPage);
  EXPECT_EQ(::mincore(const_cast<std::byte*>(bytes), size_bytes, pages.data()), 0);
  return static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

// Small pages, so that each is counted.
std::unique_ptr<HostMemory> small_pages(size_t size_bytes) {
  auto memory = HostMemory::map(size_bytes);
  ::madvise(memory->bytes(), size_bytes, MADV_NOHUGEPAGE);
  return memory;
}

TEST(HostMemoryTest, PopulatingTakesTheRangeAndNoMore) {
  const auto memory = small_pages(64 * kPage);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->bytes()) % (2 * kMiB), 0u);
  EXPECT_EQ(resident_pages(memory->bytes(), 64 * kPage), 0u);
  memory->bytes()[9 * kPage] = std::byte{7};
  memory->populate(8 * kPage, 10 * kPage);
  EXPECT_EQ(resident_pages(memory->bytes(), 64 * kPage), 10u);
  EXPECT_EQ(memory->bytes()[9 * kPage], std::byte{7});
  memory->discard(8 * kPage, 10 * kPage);
  EXPECT_EQ(resident_pages(memory->bytes(), 64 * kPage), 0u);
  EXPECT_EQ(memory->bytes()[9 * kPage], std::byte{0});
}

// The system's own call refuses such a range. Before Linux 5.14 it refuses all of them.
TEST(HostMemoryTest, WhereTheSystemCantPopulateEachPageIsTouched) {
  const auto memory = small_pages(64 * kPage);
  memory->bytes()[4 * kPage - 1] = std::byte{7};
  memory->bytes()[4 * kPage] = std::byte{8};
  memory->populate(4 * kPage - 1, 3 * kPage + 2);
  EXPECT_EQ(resident_pages(memory->bytes(), 64 * kPage), 5u);
  EXPECT_EQ(resident_pages(memory->bytes() + 3 * kPage, 5 * kPage), 5u);
  EXPECT_EQ(memory->bytes()[4 * kPage - 1], std::byte{7});
  EXPECT_EQ(memory->bytes()[4 * kPage], std::byte{8});
}

TEST(HostMemoryTest, WhatTheSystemDoesNotGiveIsAStoreError) {
  const auto memory = small_pages(64 * kPage);
  ASSERT_EQ(::munmap(memory->bytes() + 5 * kPage, kPage), 0);
  try {
    memory->populate(0, 32 * kPage);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StoreError& error) {
    EXPECT_EQ(error.shortage.requested_bytes, 32 * kPage);
    EXPECT_NE(std::string(error.what()).find("Cannot allocate memory"), std::string::npos) << error.what();
  }
}

TEST(HostMemoryTest, ThreadsPopulateAllOfIt) {
  for (const int threads : {1, 3}) {
    const size_t size_bytes = 3 * 64 * kMiB + 5 * kPage;
    const auto memory = small_pages(size_bytes);
    memory->populate(threads);
    EXPECT_EQ(resident_pages(memory->bytes(), size_bytes), size_bytes / kPage);
  }
}

// Records the requests. Fails on demand.
class ListedBackup final : public Backup {
 public:
  void write(size_t, const std::byte*, size_t) override {}
  void read(size_t, std::byte*, size_t) const override {}
  void discard(size_t, size_t) noexcept override {}
  std::byte* view() override { return nullptr; }
  void populate(size_t offset, size_t size_bytes) override {
    if (offset == failing_offset) throw StoreError("no pages", {size_bytes, 0, kUnlimited});
    const std::lock_guard lock(mutex_);
    EXPECT_FALSE(is_sealed) << "populated after it was sealed";
    EXPECT_TRUE(ranges.emplace(offset, size_bytes).second) << "twice";
    threads.insert(std::this_thread::get_id());
  }
  void seal() override {
    EXPECT_FALSE(is_sealed) << "twice";
    if (fails_to_seal) throw StoreError("not pinned", {});
    is_sealed = true;
    threads.insert(std::this_thread::get_id());
  }
  bool covers(size_t size_bytes) const {
    size_t next = 0;
    for (const auto& [offset, range_bytes] : ranges) {
      if (offset != next || range_bytes > 32 * kMiB) return false;
      next += range_bytes;
    }
    return next == size_bytes;
  }

  std::map<size_t, size_t> ranges;
  std::set<std::thread::id> threads;
  size_t failing_offset = SIZE_MAX;
  bool fails_to_seal = false;
  bool is_sealed = false;

 private:
  std::mutex mutex_;
};

class PopulateAll : public ::testing::TestWithParam<int> {
 protected:
  void run(int threads) {
    std::vector<std::pair<Backup*, size_t>> all;
    for (size_t index = 0; index < backups.size(); ++index) all.emplace_back(&backups[index], sizes[index]);
    populate_all(all, threads);
  }
  std::vector<ListedBackup> backups{4};
  const std::vector<size_t> sizes = {100 * kMiB, 0, 5000, 32 * kMiB};
};

TEST_P(PopulateAll, EveryByteIsTakenOnceAndEachBackupIsSealed) {
  run(GetParam());
  for (size_t index = 0; index < backups.size(); ++index) {
    EXPECT_TRUE(backups[index].covers(sizes[index])) << index;
    EXPECT_TRUE(backups[index].is_sealed) << index;
    if (GetParam() <= 1) {
      EXPECT_EQ(backups[index].threads, std::set{std::this_thread::get_id()});
    }
  }
}

TEST_P(PopulateAll, TheFirstErrorIsThrownAndNothingIsSealed) {
  backups[0].failing_offset = 32 * kMiB;
  EXPECT_THROW(run(GetParam()), StoreError);
  for (const ListedBackup& backup : backups) EXPECT_FALSE(backup.is_sealed);
}

TEST_P(PopulateAll, ABackupThatCantBeSealedEndsItThere) {
  backups[2].fails_to_seal = true;
  EXPECT_THROW(run(GetParam()), StoreError);
  EXPECT_TRUE(backups[0].is_sealed);
  EXPECT_TRUE(backups[1].is_sealed);
  EXPECT_FALSE(backups[3].is_sealed);
}

INSTANTIATE_TEST_SUITE_P(Threads, PopulateAll, ::testing::Values(0, 1, 2, 8, 100));

TEST(PopulateAllTest, NothingIsDoneAtOnce) { populate_all({}, 8); }

TEST(PopulateAllTest, AStoresOwnErrorArrivesFromAnyThread) {
  for (const int threads : {1, 3}) {
    const auto good = open_backup(BackupKind::kRam, 64 * kMiB);
    const auto bad = open_backup(BackupKind::kRam, kMiB);
    ASSERT_EQ(::munmap(const_cast<std::byte*>(bad->view()) + 5 * kPage, kPage), 0);
    EXPECT_THROW(populate_all({{good.get(), 64 * kMiB}, {bad.get(), kMiB}}, threads), StoreError);
  }
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
// Too little address space for the stack of a thread.
TEST_F(PopulateAll, WithoutThreadsTheCallerDoesItAll) {
  long pages = 0;
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  ASSERT_NE(file, nullptr);
  ASSERT_EQ(std::fscanf(file, "%ld", &pages), 1);
  std::fclose(file);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  const rlimit tight = {static_cast<rlim_t>(pages * ::sysconf(_SC_PAGESIZE)) + kMiB, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  run(8);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  for (size_t index = 0; index < backups.size(); ++index) {
    EXPECT_TRUE(backups[index].covers(sizes[index])) << index;
    EXPECT_TRUE(backups[index].is_sealed) << index;
  }
}
#endif

}  // namespace
}  // namespace ebbtide
