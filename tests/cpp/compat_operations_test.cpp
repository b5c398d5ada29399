// pause, resume and memory of torch_memory_saver, on the simulated device.
#include <cuda.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "api/ebbtide.h"
#include "api/ebbtide_settings.h"
#include "sim_control.h"

extern "C" {
void tms_set_interesting_region(bool is_on);
void tms_set_current_tag(const char* tag);
void tms_set_enable_cpu_backup(bool is_on);
void tms_set_cpu_backup_backend(const char* name);
void tms_set_enable_disk_backup(bool is_on);
void tms_set_disk_backup_dir(const char* directory);
void tms_set_retain_cpu_backup(bool is_on);
void set_memory_margin_bytes(uint64_t bytes);
int tms_pause(const char* tag);
int tms_resume(const char* tag);
uint8_t* tms_get_cpu_backup_pointer(const uint8_t* address, uint64_t size_bytes);
void* tms_torch_malloc(ssize_t size_bytes, int device, void* stream);
void tms_torch_free(void* address, ssize_t size_bytes, int device, void* stream);
}

namespace ebbtide::testing {
namespace {

constexpr size_t kSize = 4 << 20;
constexpr int kOutOfMemory = 2;
constexpr int kUnknown = 999;

// With the core of the process, which the C API uses.
class CompatOperations : public ::testing::Test {
 protected:
  CompatOperations() {
    sim().reset();
    ebbtide_use_driver("sim", nullptr);
  }
  // What torch would get in a region of torch_memory_saver.
  static void* take(const char* tag, bool has_backup, ssize_t size_bytes = ssize_t{kSize}) {
    tms_set_current_tag(tag);
    tms_set_interesting_region(true);
    tms_set_enable_cpu_backup(has_backup);
    return tms_torch_malloc(size_bytes, 0, nullptr);
  }
  // The simulator's memory is the host's.
  static uint8_t byte_of(uint64_t seed, size_t at) { return static_cast<uint8_t>((at ^ (at >> 12)) * 37 + seed); }
  static void fill(void* address, uint64_t seed) {
    for (size_t at = 0; at < kSize; ++at) static_cast<uint8_t*>(address)[at] = byte_of(seed, at);
  }
  static bool holds(const void* address, uint64_t seed) {
    size_t at = 0;
    while (at < kSize && static_cast<const uint8_t*>(address)[at] == byte_of(seed, at)) ++at;
    return at == kSize;
  }
  static bool is_paused(void* address) { return ebbtide_is_away(address, kSize) != 0; }
  static uint8_t* backup_of(void* address, uint64_t size_bytes = kSize) {
    return tms_get_cpu_backup_pointer(static_cast<const uint8_t*>(address), size_bytes);
  }
};

TEST_F(CompatOperations, ATagLeavesAndReturns) {
  void* const kept = take("weights", true);
  void* const dropped = take("kv", false);
  fill(kept, 1);
  fill(dropped, 2);
  EXPECT_EQ(tms_pause("weights"), 0);
  EXPECT_TRUE(is_paused(kept));
  EXPECT_FALSE(is_paused(dropped));
  EXPECT_EQ(tms_pause(nullptr), 0) << "what is paused is skipped, and the rest follows";
  EXPECT_TRUE(is_paused(dropped));
  EXPECT_EQ(tms_resume(""), 0);
  EXPECT_TRUE(holds(kept, 1));
  EXPECT_FALSE(holds(dropped, 2));
  tms_torch_free(kept, kSize, 0, nullptr);
  tms_torch_free(dropped, kSize, 0, nullptr);
}

TEST_F(CompatOperations, WhatIsEmptyUnknownOrDoneIsSuccess) {
  EXPECT_EQ(tms_pause("nobody"), 0);
  EXPECT_EQ(tms_resume("nobody"), 0);
  EXPECT_EQ(tms_pause(nullptr), 0);
  EXPECT_EQ(tms_resume(nullptr), 0);
  void* const address = take("a/b", true);
  EXPECT_EQ(tms_resume("a/b"), 0) << "resident";
  EXPECT_EQ(tms_pause("a/b"), 0);
  EXPECT_EQ(tms_pause("a/b"), 0) << "paused already";
  void* const later = take("a/b", true);
  EXPECT_EQ(tms_pause("a/b"), 0) << "paused in part";
  EXPECT_TRUE(is_paused(address) && is_paused(later));
  EXPECT_EQ(tms_resume("a/b"), 0);
  EXPECT_FALSE(is_paused(address) || is_paused(later));
  tms_torch_free(address, kSize, 0, nullptr);
  tms_torch_free(later, kSize, 0, nullptr);
}

TEST_F(CompatOperations, PausedMemoryMayBeFreed) {
  void* const address = take("weights", true);
  EXPECT_EQ(tms_pause("weights"), 0);
  tms_torch_free(address, kSize, 0, nullptr);
  EXPECT_EQ(tms_resume("weights"), 0);
  EXPECT_EQ(tms_pause("weights"), 0);
}

TEST_F(CompatOperations, ALeasedTagIsAnError) {
  void* const address = take("weights", true);
  ebbtide_lease lease{};
  ASSERT_EQ(ebbtide_open_lease("weights", "me", &lease, nullptr), EBBTIDE_OK);
  EXPECT_EQ(tms_pause("weights"), kUnknown);
  EXPECT_FALSE(is_paused(address));
  ebbtide_close_lease(lease.id, nullptr);
  EXPECT_EQ(tms_pause("weights"), 0);
  tms_torch_free(address, kSize, 0, nullptr);
}

TEST_F(CompatOperations, AResumeWithoutRoomIsOutOfMemoryAndCanBeRepeated) {
  void* const address = take("weights", true);
  fill(address, 3);
  ASSERT_EQ(tms_pause("weights"), 0);
  ASSERT_EQ(ebbtide_configure("device_limit", "2MiB", nullptr), EBBTIDE_OK);
  EXPECT_EQ(tms_resume("weights"), kOutOfMemory);
  EXPECT_TRUE(is_paused(address));
  ASSERT_EQ(ebbtide_configure("device_limit", nullptr, nullptr), EBBTIDE_OK);
  EXPECT_EQ(tms_resume("weights"), 0);
  EXPECT_TRUE(holds(address, 3));
  tms_torch_free(address, kSize, 0, nullptr);
}

TEST_F(CompatOperations, AFailureOfTheDriverIsItsCode) {
  void* const address = take("weights", true);
  fill(address, 4);
  sim().fail("cuMemUnmap", 1, CUDA_ERROR_INVALID_HANDLE, 1);
  EXPECT_EQ(tms_pause("weights"), static_cast<int>(CUDA_ERROR_INVALID_HANDLE));
  EXPECT_EQ(tms_pause("weights"), 0);
  EXPECT_EQ(tms_resume("weights"), 0);
  EXPECT_TRUE(holds(address, 4));
  tms_torch_free(address, kSize, 0, nullptr);
}

TEST_F(CompatOperations, TheBackupOfPausedMemoryIsReadable) {
  tms_set_cpu_backup_backend("mmap");
  void* const address = take("weights", true);
  fill(address, 7);
  EXPECT_EQ(backup_of(address), nullptr) << "resident";
  ASSERT_EQ(tms_pause("weights"), 0);
  const uint8_t* const bytes = backup_of(address);
  ASSERT_NE(bytes, nullptr);
  EXPECT_TRUE(holds(bytes, 7));
  EXPECT_EQ(backup_of(static_cast<uint8_t*>(address) + 4097, 100), bytes + 4097);
  ASSERT_EQ(tms_resume("weights"), 0);
  EXPECT_EQ(backup_of(address), nullptr) << "not retained";
  tms_torch_free(address, kSize, 0, nullptr);
}

TEST_F(CompatOperations, WithoutABackupInMemoryThereIsNoPointer) {
  void* const dropped = take("kv", false);
  tms_set_disk_backup_dir(::testing::TempDir().c_str());
  tms_set_enable_disk_backup(true);
  void* const on_disk = tms_torch_malloc(kSize, 0, nullptr);
  ASSERT_NE(on_disk, nullptr);
  fill(on_disk, 5);
  ASSERT_EQ(tms_pause(nullptr), 0);
  EXPECT_EQ(backup_of(dropped), nullptr);
  EXPECT_EQ(backup_of(on_disk), nullptr);
  int local = 0;
  EXPECT_EQ(backup_of(&local, 4), nullptr) << "nothing of ours";
  ASSERT_EQ(tms_resume(nullptr), 0);
  EXPECT_TRUE(holds(on_disk, 5));
  EXPECT_EQ(backup_of(dropped, 1 << 30), nullptr) << "beyond the allocation";
  tms_torch_free(dropped, kSize, 0, nullptr);
  tms_torch_free(on_disk, kSize, 0, nullptr);
}

TEST_F(CompatOperations, ADiskBackupIsAFileInTheFolderThatWasSet) {
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "ebbtide-compat-files";
  std::filesystem::create_directory(folder);
  const auto count = [&] {
    const std::filesystem::directory_iterator files(folder);
    return std::distance(begin(files), end(files));
  };
  void* const address = take("weights", false);
  tms_torch_free(address, kSize, 0, nullptr);
  tms_set_disk_backup_dir(folder.c_str());
  tms_set_enable_disk_backup(true);
  void* const on_disk = tms_torch_malloc(kSize, 0, nullptr);
  fill(on_disk, 10);
  EXPECT_EQ(count(), 0);
  ASSERT_EQ(tms_pause("weights"), 0);
  EXPECT_EQ(count(), 1);
  ASSERT_EQ(tms_resume("weights"), 0);
  EXPECT_TRUE(holds(on_disk, 10));
  tms_torch_free(on_disk, kSize, 0, nullptr);
  EXPECT_EQ(count(), 0);
  std::filesystem::remove_all(folder);
}

TEST_F(CompatOperations, TheFolderIsMadeAgainAtAPauseWhereItIsGone) {
  const std::filesystem::path parent = "/var/tmp/ebbtide-test-made-again-" + std::to_string(::getpid());
  const std::filesystem::path folder = parent / "backups";
  std::filesystem::create_directories(folder);
  tms_set_disk_backup_dir(folder.c_str());
  tms_set_current_tag("made again");
  tms_set_interesting_region(true);
  tms_set_enable_disk_backup(true);
  void* const on_disk = tms_torch_malloc(kSize, 0, nullptr);
  fill(on_disk, 11);
  std::filesystem::remove_all(parent);
  EXPECT_EQ(tms_pause("made again"), 0);
  EXPECT_TRUE(std::filesystem::is_directory(folder));
  EXPECT_EQ(tms_resume("made again"), 0);
  EXPECT_TRUE(holds(on_disk, 11));
  std::filesystem::remove_all(parent);
  ebbtide_configure("disk_directory", nullptr, nullptr);
  EXPECT_EQ(tms_pause("made again"), 0);
  EXPECT_FALSE(std::filesystem::exists(folder)) << "another folder was chosen since";
  EXPECT_EQ(tms_resume("made again"), 0);
  tms_torch_free(on_disk, kSize, 0, nullptr);
  tms_set_enable_disk_backup(false);
}

TEST_F(CompatOperations, AFolderThatIsMissingIsMadeAndOneThatCannotBeLeavesTheOther) {
  const auto in_force = [] {
    char path[4096] = "";
    EXPECT_EQ(ebbtide_get_setting("disk_directory", path, sizeof path, nullptr, nullptr), EBBTIDE_OK);
    return std::string(path);
  };
  const std::string made = ::testing::TempDir() + "ebbtide_made_" + std::to_string(::getpid());
  tms_set_disk_backup_dir((made + "/deep").c_str());
  EXPECT_TRUE(std::filesystem::is_directory(made + "/deep"));
  EXPECT_EQ(in_force(), made + "/deep");
  tms_set_disk_backup_dir("/dev/null/nor/there");
  tms_set_disk_backup_dir(nullptr);
  EXPECT_EQ(in_force(), made + "/deep");
  std::filesystem::remove_all(made);
}

TEST_F(CompatOperations, AMarginIsLeftFree) {
  void* const first = take("weights", false);
  ASSERT_NE(first, nullptr);
  set_memory_margin_bytes(uint64_t{1} << 60);
  EXPECT_EQ(take("weights", false), nullptr);
  set_memory_margin_bytes(0);
  void* const second = take("weights", false);
  EXPECT_NE(second, nullptr);
  tms_torch_free(first, kSize, 0, nullptr);
  tms_torch_free(second, kSize, 0, nullptr);
}

TEST_F(CompatOperations, PinnedBackupsGoUnlessTheyAreRetained) {
  void* const address = take("weights", true);
  const auto stored = [&] {
    ebbtide_stats stats = {};
    EXPECT_EQ(ebbtide_get_stats(&stats, nullptr), EBBTIDE_OK);
    return stats.pinned_bytes;
  };
  fill(address, 6);
  ASSERT_EQ(tms_pause(nullptr), 0);
  ASSERT_EQ(tms_resume(nullptr), 0);
  const uint64_t without = stored();
  tms_set_retain_cpu_backup(true);
  ASSERT_EQ(tms_pause(nullptr), 0);
  ASSERT_EQ(tms_resume(nullptr), 0);
  EXPECT_EQ(stored(), without + kSize);
  tms_set_retain_cpu_backup(false);
  ASSERT_EQ(tms_pause(nullptr), 0);
  ASSERT_EQ(tms_resume(nullptr), 0);
  EXPECT_EQ(stored(), without);
  EXPECT_TRUE(holds(address, 6));
  tms_torch_free(address, kSize, 0, nullptr);
}

// As torch_memory_saver's own test: retaining may begin between a pause and its resume.
TEST_F(CompatOperations, ARetainedBackupStaysAtItsAddressAndIsRefreshed) {
  for (const char* backend : {"mmap", "pinned"}) {
    tms_set_cpu_backup_backend(backend);
    void* const address = take(backend, true);
    fill(address, 8);
    ASSERT_EQ(tms_pause(backend), 0);
    const uint8_t* const bytes = backup_of(address);
    ASSERT_NE(bytes, nullptr);
    tms_set_retain_cpu_backup(true);
    ASSERT_EQ(tms_resume(backend), 0);
    EXPECT_EQ(backup_of(address), bytes) << backend;
    fill(address, 9);
    EXPECT_TRUE(holds(backup_of(address), 8)) << backend << ": as it was when it left";
    ASSERT_EQ(tms_pause(backend), 0);
    EXPECT_EQ(backup_of(address), bytes) << backend;
    EXPECT_TRUE(holds(bytes, 9)) << backend;
    tms_set_retain_cpu_backup(false);
    ASSERT_EQ(tms_resume(backend), 0);
    EXPECT_EQ(backup_of(address), nullptr) << backend;
    EXPECT_TRUE(holds(address, 9)) << backend;
    tms_torch_free(address, kSize, 0, nullptr);
  }
}

TEST_F(CompatOperations, AnAllocationThatIsRefusedIsNull) {
  EXPECT_EQ(take("weights", true, 0), nullptr);
  EXPECT_EQ(take("weights", true, -1), nullptr);
  EXPECT_EQ(take("weights", true, ssize_t{1} << 40), nullptr);
  EXPECT_EQ(tms_torch_malloc(kSize, -1, nullptr), nullptr) << "no such device";
  tms_torch_free(nullptr, 0, 0, nullptr);
}

}  // namespace
}  // namespace ebbtide::testing
