// The folder of disk backups: the choice of it, and the meaning of a relative path.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/scope_exit.h"
#include "store/disk_directory.h"

namespace ebbtide::testing {
namespace {

TEST(DiskDirectoryTest, TheProgramGoesBeforeTheVariableAndThatBeforeTheSystems) {
  ::unsetenv("EBBTIDE_DISK_DIRECTORY");
  ::unsetenv("TMPDIR");
  EXPECT_EQ(disk_directory(), "/var/tmp");
  ::setenv("TMPDIR", "/scratch/tmp", 1);
  EXPECT_EQ(disk_directory(), "/scratch/tmp");
  ::setenv("EBBTIDE_DISK_DIRECTORY", "/scratch/backups", 1);
  EXPECT_EQ(disk_directory(), "/scratch/backups");
  set_disk_directory("/mnt/nvme");
  EXPECT_EQ(disk_directory(), "/mnt/nvme");
  set_disk_directory("");
  ::setenv("EBBTIDE_DISK_DIRECTORY", "", 1);
  EXPECT_EQ(disk_directory(), "/scratch/tmp");
  ::unsetenv("TMPDIR");
}

TEST(DiskDirectoryTest, ARelativePathStaysTheFolderThatItNamedFirst) {
  const std::filesystem::path before = std::filesystem::current_path();
  const ScopeExit go_back([&]() noexcept {
    std::filesystem::current_path(before);
    ::unsetenv("EBBTIDE_DISK_DIRECTORY");
    set_disk_directory("");
  });
  std::filesystem::current_path("/var");
  set_disk_directory("tmp");
  std::filesystem::current_path("/");
  EXPECT_EQ(disk_directory(), "/var/tmp");
  set_disk_directory("");
  ::setenv("EBBTIDE_DISK_DIRECTORY", "tmp", 1);
  EXPECT_EQ(disk_directory(), "/tmp");
  std::filesystem::current_path("/var");
  EXPECT_EQ(disk_directory(), "/tmp");
}

}  // namespace
}  // namespace ebbtide::testing
