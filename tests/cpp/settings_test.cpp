// Parsing of settings: one rule for each kind, and the words of settings.def in the preload library.
#include "base/settings.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "base/bytes.h"
#include "base/error.h"

namespace ebbtide::testing {
namespace {

std::string refusal(Setting setting, const std::string& text) {
  try {
    check_setting(facts_of(setting), text, "x");
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

std::string plain(Setting setting, const std::string& text) { return check_setting(facts_of(setting), text, "x"); }

TEST(SettingsTest, TheListIsInTheOrderOfItsNames) {
  std::set<std::string> names;
  for (const SettingFacts& facts : all_settings()) {
    EXPECT_EQ(&facts_of(facts.id), &facts);
    EXPECT_EQ(find_setting(facts.name), &facts);
    EXPECT_TRUE(names.insert(facts.name).second);
  }
  EXPECT_EQ(find_setting("no_such_setting"), nullptr);
}

TEST(SettingsTest, SizesAreExact) {
  EXPECT_EQ(plain(Setting::kHostLimit, "0.7KB"), "700");
  EXPECT_EQ(plain(Setting::kHostLimit, "\t1.5 mib\n"), std::to_string(3 * kMiB / 2));
  EXPECT_EQ(plain(Setting::kHostLimit, "9223372036854775807"), "9223372036854775807");
  EXPECT_EQ(plain(Setting::kHostLimit, "0.0000000000000000000000001TiB"), "0");
  EXPECT_EQ(refusal(Setting::kHostLimit, "1PiB").substr(0, 29), "x has the unknown unit 'PiB' ");
}

TEST(SettingsTest, WhatIsNoSizeIsRefused) {
  for (const char* text : {"", " ", "GiB", "1e9", "1_000", "0x10", "1.2.3", ".5", "5.", "1 2", "+1", "--1", "1GiB!"}) {
    EXPECT_TRUE(refusal(Setting::kHostLimit, text).starts_with("x must be a size")) << text;
  }
  EXPECT_EQ(refusal(Setting::kHostLimit, "9223372036854775808"), "x is beyond any memory: '9223372036854775808'");
  EXPECT_EQ(refusal(Setting::kHostLimit, std::string(1000, '9')).size(),
            refusal(Setting::kHostLimit, std::string(65, '9')).size());
  EXPECT_EQ(refusal(Setting::kSimCapacity, "0"), "x must be more than 0 bytes");
  EXPECT_EQ(refusal(Setting::kHostLimit, std::string("1\0", 2)),
            "x must be a size like \"16GiB\" or \"512MiB\", not '1\\x00'");
}

TEST(SettingsTest, WordsAndCountsAndPaths) {
  EXPECT_EQ(plain(Setting::kOverflow, " Whole "), "whole");
  EXPECT_EQ(refusal(Setting::kOverflow, "split|whole"),
            "x must be one of split, managed, whole, none, not 'split|whole'");
  EXPECT_EQ(plain(Setting::kCopyThreads, "256"), "256");
  for (const char* text : {"0", "257", "-3", "1.5", "99999999999999999999", ""})
    EXPECT_NE(refusal(Setting::kCopyThreads, text), "");
  EXPECT_EQ(plain(Setting::kDiskDirectory, " a "), " a ");
  EXPECT_NE(refusal(Setting::kDiskDirectory, ""), "");
  EXPECT_NE(refusal(Setting::kLedger, std::string("a\0b", 3)), "");
}

TEST(SettingsTest, AMalformedVariableIsAsIfItWereNotSet) {
  ::setenv("EBBTIDE_LOG", "loud", 1);
  ::setenv("EBBTIDE_COPY_THREADS", "many", 1);
  EXPECT_EQ(word_index(Setting::kLog), -1);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(read_number(Setting::kCopyThreads), std::nullopt);
  EXPECT_EQ(read_number(Setting::kCopyThreads), std::nullopt);
  say_malformed_variables();
  say_malformed_variables();
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "ebbtide: EBBTIDE_COPY_THREADS must be a whole number from 1 to 256, not 'many'; it is ignored\n"
            "ebbtide: EBBTIDE_LOG must be one of error, warning, info, debug, not 'loud'; it is ignored\n");
  EXPECT_EQ(source_of(Setting::kCopyThreads), "default");
  ::setenv("EBBTIDE_COPY_THREADS", "3", 1);
  EXPECT_EQ(read_number(Setting::kCopyThreads), 3U);
  EXPECT_EQ(source_of(Setting::kCopyThreads), "EBBTIDE_COPY_THREADS");
  set_configured(Setting::kHostLimit, true);
  EXPECT_EQ(source_of(Setting::kHostLimit), "configured");
  EXPECT_EQ(how_to_change(Setting::kHostLimit), "host_limit");
  set_configured(Setting::kHostLimit, false);
  EXPECT_EQ(how_to_change(Setting::kHostLimit), "host_limit (EBBTIDE_HOST_LIMIT, --host-limit)");
}

}  // namespace
}  // namespace ebbtide::testing
