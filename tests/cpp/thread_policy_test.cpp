// Policies of threads, through the C API.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>

#include "api/ebbtide.h"

namespace {

ebbtide_thread_policy make(int32_t tagging, const std::string& tag) {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  policy.tagging = tagging;
  std::strncpy(policy.tag, tag.c_str(), sizeof policy.tag - 1);
  return policy;
}

ebbtide_thread_policy mine() {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  EXPECT_EQ(ebbtide_get_thread_policy(&policy, nullptr), EBBTIDE_OK);
  return policy;
}

std::string refusal(const ebbtide_thread_policy& policy) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  EXPECT_EQ(ebbtide_set_thread_policy(&policy, &error), EBBTIDE_INVALID_ARGUMENT);
  return error.message;
}

TEST(ThreadPolicy, IsUnsetUntilItIsSetAndBelongsToItsThread) {
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_UNSET);
  EXPECT_STREQ(mine().tag, "");
  ebbtide_thread_policy policy = make(EBBTIDE_TAGGING_ON, "weights");
  policy.backup = EBBTIDE_BACKUP_PINNED;
  policy.retain = 1;
  ASSERT_EQ(ebbtide_set_thread_policy(&policy, nullptr), EBBTIDE_OK);
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_ON);
  EXPECT_EQ(mine().backup, EBBTIDE_BACKUP_PINNED);
  EXPECT_EQ(mine().retain, 1);
  EXPECT_STREQ(mine().tag, "weights");
  std::thread([] { EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_UNSET); }).join();
  ASSERT_EQ(ebbtide_set_thread_policy(nullptr, nullptr), EBBTIDE_OK);
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_UNSET);
}

TEST(ThreadPolicy, KeepsTheTagOfAThreadThatIsOff) {
  const ebbtide_thread_policy policy = make(EBBTIDE_TAGGING_OFF, "weights");
  ASSERT_EQ(ebbtide_set_thread_policy(&policy, nullptr), EBBTIDE_OK);
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_OFF);
  EXPECT_STREQ(mine().tag, "weights");
}

TEST(ThreadPolicy, ARefusedOneChangesNothing) {
  const ebbtide_thread_policy policy = make(EBBTIDE_TAGGING_ON, "weights");
  ASSERT_EQ(ebbtide_set_thread_policy(&policy, nullptr), EBBTIDE_OK);
  EXPECT_EQ(refusal(make(3, "a")), "tagging is 0 (unset), 1 (off) or 2 (on)");
  EXPECT_EQ(refusal(make(-1, "a")), "tagging is 0 (unset), 1 (off) or 2 (on)");
  EXPECT_EQ(refusal(make(EBBTIDE_TAGGING_ON, "")), "a tag must not be empty");
  EXPECT_NE(refusal(make(EBBTIDE_TAGGING_OFF, "a/b")).find("reserved"), std::string::npos);
  ebbtide_thread_policy wrong = make(EBBTIDE_TAGGING_ON, "a");
  wrong.backup = 4;
  EXPECT_NE(refusal(wrong).find("unknown backup kind 4"), std::string::npos);
  wrong = make(EBBTIDE_TAGGING_ON, "a");
  std::memset(wrong.tag, 'x', sizeof wrong.tag);
  EXPECT_EQ(refusal(wrong), "the tag does not end with NUL");
  EXPECT_STREQ(mine().tag, "weights");
  EXPECT_EQ(ebbtide_get_thread_policy(nullptr, nullptr), EBBTIDE_INVALID_ARGUMENT);
  EXPECT_EQ(ebbtide_get_program_policy(nullptr, nullptr), EBBTIDE_INVALID_ARGUMENT);
}

TEST(ThreadPolicy, CountsAsLongAsItsLeaseIsOpen) {
  ebbtide_lease lease{};
  ASSERT_EQ(ebbtide_open_lease("weights", "me", &lease, nullptr), EBBTIDE_OK);
  ebbtide_thread_policy policy = make(EBBTIDE_TAGGING_ON, "weights");
  policy.lease = lease.id;
  ASSERT_EQ(ebbtide_set_thread_policy(&policy, nullptr), EBBTIDE_OK);
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_ON);
  EXPECT_EQ(mine().lease, lease.id);
  std::thread([&] { ebbtide_close_lease(lease.id, nullptr); }).join();
  EXPECT_EQ(mine().tagging, EBBTIDE_TAGGING_UNSET);
  EXPECT_STREQ(mine().tag, "");
}

TEST(ThreadPolicy, WithoutThePreloadLibraryThereIsNoProgramPolicy) {
  ebbtide_thread_policy policy = make(EBBTIDE_TAGGING_ON, "weights");
  ASSERT_EQ(ebbtide_get_program_policy(&policy, nullptr), EBBTIDE_OK);
  EXPECT_EQ(policy.tagging, EBBTIDE_TAGGING_UNSET);
}

}  // namespace
