// What torch_memory_saver keeps for each thread.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "api/ebbtide.h"

extern "C" {
void tms_set_interesting_region(bool is_on);
bool tms_get_interesting_region();
void tms_set_current_tag(const char* tag);
const char* tms_get_current_tag();
void tms_set_enable_cpu_backup(bool is_on);
bool tms_get_enable_cpu_backup();
void tms_set_cpu_backup_backend(const char* name);
const char* tms_get_cpu_backup_backend();
void tms_set_enable_disk_backup(bool is_on);
bool tms_get_enable_disk_backup();
void tms_set_retain_cpu_backup(bool is_on);
bool tms_get_retain_cpu_backup();
}

namespace {

ebbtide_thread_policy mine() {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  ebbtide_get_thread_policy(&policy, nullptr);
  return policy;
}

// The answer of a getter of TMS.
std::string state() {
  std::string text = tms_get_interesting_region() ? "on " : "off ";
  text += tms_get_current_tag();
  text += tms_get_enable_cpu_backup() ? std::string(" ") + tms_get_cpu_backup_backend() : "";
  text += tms_get_enable_disk_backup() ? " disk" : "";
  return text;
}

TEST(CompatThreads, AThreadBeginsAsTorchMemorySaverDoes) {
  EXPECT_EQ(state(), "off default");
  EXPECT_STREQ(tms_get_cpu_backup_backend(), "pinned");
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_UNSET) << "asking sets nothing";
}

TEST(CompatThreads, TheSettingIsTheThreadsPolicy) {
  tms_set_current_tag("kv_cache");
  tms_set_interesting_region(true);
  EXPECT_EQ(state(), "on kv_cache");
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_ON);
  EXPECT_EQ(mine().backup, EBBTIDE_BACKUP_NONE) << "no backup unless asked for one";
  tms_set_enable_cpu_backup(true);
  EXPECT_EQ(state(), "on kv_cache pinned");
  EXPECT_EQ(mine().backup, EBBTIDE_BACKUP_PINNED);
  std::thread([] { EXPECT_EQ(state(), "off default"); }).join();
  tms_set_interesting_region(false);
  EXPECT_EQ(state(), "off kv_cache pinned");
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_OFF);
}

TEST(CompatThreads, TheBackendIsKeptWhereThereIsNoBackup) {
  tms_set_cpu_backup_backend("mmap");
  EXPECT_STREQ(tms_get_cpu_backup_backend(), "mmap");
  EXPECT_FALSE(tms_get_enable_cpu_backup());
  tms_set_enable_cpu_backup(true);
  EXPECT_EQ(mine().backup, EBBTIDE_BACKUP_RAM);
  tms_set_cpu_backup_backend("pinned");
  EXPECT_EQ(mine().backup, EBBTIDE_BACKUP_PINNED);
  tms_set_cpu_backup_backend("tape");
  EXPECT_STREQ(tms_get_cpu_backup_backend(), "pinned") << "an unknown word changes nothing";
  tms_set_cpu_backup_backend("mmap");
  tms_set_cpu_backup_backend(nullptr);
  EXPECT_STREQ(tms_get_cpu_backup_backend(), "pinned") << "the default";
}

// As TMS's region() does: the tag, on, the backup on the CPU, its backend, the backup on disk.
void set_all(const char* tag, bool is_on, bool has_cpu, bool has_disk) {
  tms_set_current_tag(tag);
  tms_set_interesting_region(is_on);
  tms_set_enable_cpu_backup(has_cpu);
  tms_set_enable_disk_backup(has_disk);
}

TEST(CompatThreads, NestedRegionsOverrideAndRestore) {
  set_all("outer", true, true, false);
  EXPECT_EQ(state(), "on outer pinned");
  set_all("none", true, false, false);
  EXPECT_EQ(state(), "on none");
  set_all("disk", true, false, true);
  EXPECT_EQ(state(), "on disk disk");
  set_all("none", true, false, false);
  EXPECT_EQ(state(), "on none");
  set_all("outer", true, true, false);
  EXPECT_EQ(state(), "on outer pinned");
  set_all("default", false, false, false);
  EXPECT_EQ(state(), "off default");
}

TEST(CompatThreads, AnyStringIsATag) {
  for (const std::string& tag : {std::string(""), std::string("*"), std::string("a/b"), std::string(" "),
                                 std::string("\xFF"), std::string(1000, 'x'), std::string("%")}) {
    tms_set_current_tag(tag.c_str());
    EXPECT_EQ(tms_get_current_tag(), tag);
    EXPECT_EQ(tms_get_current_tag(), tms_get_current_tag()) << "the pointer stays";
  }
  tms_set_current_tag("kept");
  tms_set_current_tag(nullptr);
  EXPECT_STREQ(tms_get_current_tag(), "kept");
}

TEST(CompatThreads, ANullTagLeavesThePolicyUnset) {
  tms_set_current_tag(nullptr);
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_UNSET);
}

TEST(CompatThreads, APolicyOfOthersShows) {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  policy.tagging = EBBTIDE_TAGGING_ON;
  policy.backup = EBBTIDE_BACKUP_RAM;
  std::strcpy(policy.tag, "a%2Fb");
  ASSERT_EQ(ebbtide_set_thread_policy(&policy, nullptr), EBBTIDE_OK);
  EXPECT_EQ(state(), "on a/b mmap");
  tms_set_interesting_region(false);
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_OFF);
  EXPECT_STREQ(mine().tag, "a%2Fb");
  EXPECT_EQ(mine().backup, EBBTIDE_BACKUP_RAM);
}

TEST(CompatThreads, BackupsAreRetainedWhereTheProcessSaysSo) {
  EXPECT_FALSE(tms_get_retain_cpu_backup());
  tms_set_retain_cpu_backup(true);
  EXPECT_TRUE(tms_get_retain_cpu_backup());
  tms_set_interesting_region(true);
  EXPECT_EQ(mine().retain, 0) << "there is no backup";
  tms_set_enable_cpu_backup(true);
  EXPECT_EQ(mine().retain, 1);
  tms_set_retain_cpu_backup(false);
  EXPECT_FALSE(tms_get_retain_cpu_backup());
}

TEST(CompatThreads, TheVariablesDecideAtFirstUse) {
  ::setenv("TMS_INIT_ENABLE", "yes", 1);
  ::setenv("TMS_INIT_ENABLE_CPU_BACKUP", "true", 1);
  ::setenv("TMS_INIT_CPU_BACKUP_BACKEND", "mmap", 1);
  ::setenv("TMS_RETAIN_CPU_BACKUP", "maybe", 1);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(state(), "on default mmap");
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_NE(said.find("TMS_RETAIN_CPU_BACKUP must be 0 or 1"), std::string::npos) << said;
  EXPECT_FALSE(tms_get_retain_cpu_backup()) << "malformed values are ignored";
  ::setenv("TMS_INIT_ENABLE", "0", 1);
  std::thread([] { EXPECT_EQ(state(), "on default mmap"); }).join();
}

TEST(CompatThreads, ADiskBackupComesBeforeOneOnTheCpu) {
  ::setenv("TMS_INIT_ENABLE_CPU_BACKUP", "1", 1);
  ::setenv("TMS_INIT_ENABLE_DISK_BACKUP", "1", 1);
  ::setenv("TMS_INIT_CPU_BACKUP_BACKEND", "tape", 1);
  EXPECT_EQ(state(), "off default disk");
  EXPECT_STREQ(tms_get_cpu_backup_backend(), "pinned");
}

}  // namespace
