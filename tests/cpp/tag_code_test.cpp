// Any string as a tag, and back.
#include "base/tag_code.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "base/error.h"
#include "base/tag.h"

namespace ebbtide {
namespace {

TEST(TagCode, ATagWithoutAPercentSignStaysAsItIs) {
  for (const char* tag : {"weights", "kv cache", "a.b-c_d:1", "gewicht-\xC3\xA4", "~"}) {
    EXPECT_EQ(encode_tag(tag), tag);
    EXPECT_EQ(decode_tag(tag), tag);
  }
  EXPECT_EQ(encode_tag(std::string(kTagBytesMax, 'x')), std::string(kTagBytesMax, 'x'));
}

TEST(TagCode, WhatATagCannotHoldIsWrittenAsBytes) {
  EXPECT_EQ(encode_tag(""), "%");
  EXPECT_EQ(encode_tag("a/b*"), "a%2Fb%2A");
  EXPECT_EQ(encode_tag("50%"), "50%25");
  EXPECT_EQ(encode_tag(" a b "), "%20a b%20");
  EXPECT_EQ(encode_tag(" "), "%20");
  EXPECT_EQ(encode_tag(std::string("a\0\n", 3)), "a%00%0A");
  EXPECT_EQ(encode_tag("\xE2\x80\x8B"), "%E2%80%8B") << "a space of no width";
  EXPECT_EQ(encode_tag("\xC3"), "%C3") << "half a character";
}

TEST(TagCode, ALongStringIsCutAndKnownToThisProcess) {
  const std::string text = std::string(300, 'x') + "1";
  const std::string tag = encode_tag(text);
  EXPECT_EQ(tag.size(), kTagBytesMax);
  EXPECT_TRUE(tag.starts_with("%~")) << tag;
  EXPECT_TRUE(tag.ends_with("~" + std::string(220, 'x'))) << tag;
  EXPECT_EQ(encode_tag(text), tag) << "the same string has the same tag";
  EXPECT_NE(encode_tag(std::string(300, 'x') + "2"), tag) << "the same beginning is not the same tag";
  EXPECT_EQ(decode_tag(tag), text);
  const std::string foreign = "%~" + std::string(32, '0') + "~x";
  EXPECT_EQ(decode_tag(foreign), foreign);
}

TEST(TagCode, TheHashIsFnv1aSoThatRanksAgree) {
  // The empty string's hash is the offset basis; a string that is cut is never empty, so another implementation's value
  // stands here.
  const std::string tag = encode_tag(std::string(256, 'a'));
  unsigned __int128 hash = (static_cast<unsigned __int128>(7809847782465536322U) << 64) | 7113472399480571277U;
  for (int i = 0; i < 256; ++i) hash = (hash ^ 'a') * ((static_cast<unsigned __int128>(1) << 88) + 315);
  char digits[33];
  std::snprintf(digits, sizeof digits, "%016lX%016lX", static_cast<unsigned long>(hash >> 64),
                static_cast<unsigned long>(hash));
  EXPECT_EQ(tag.substr(2, 32), digits);
}

TEST(TagCode, ACutNeverEndsInsideACharacterOrWithASpace) {
  for (size_t length = 200; length < 260; ++length) {
    const std::string text = std::string(length, 'a') + "\xC3\xA4 /" + std::string(200, ' ') + "b";
    const std::string tag = encode_tag(text);
    EXPECT_NO_THROW(check_tag_name(tag)) << tag;
    EXPECT_EQ(decode_tag(tag), text);
  }
}

TEST(TagCode, EveryStringComesBackAndNoTwoMeet) {
  std::mt19937 random(7);
  const std::string pieces[] = {"a", "%", "/", "*", " ", "2", "A", "~", "\xC3", "\xA4", "\xE2\x80\x8B", "\n", "\xFF"};
  std::set<std::string> texts, tags;
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    const size_t count = i % 50 == 0 ? random() % 300 : random() % 6;
    for (size_t at = 0; at < count; ++at) text += pieces[random() % std::size(pieces)];
    const std::string tag = encode_tag(text);
    ASSERT_NO_THROW(check_tag_name(tag)) << tag;
    ASSERT_EQ(decode_tag(tag), text) << tag;
    texts.insert(text);
    tags.insert(tag);
  }
  EXPECT_EQ(texts.size(), tags.size());
}

TEST(TagCode, AMalformedTagIsReadAsFarAsItGoes) {
  EXPECT_EQ(decode_tag("50%"), "50%");
  EXPECT_EQ(decode_tag("%2"), "%2");
  EXPECT_EQ(decode_tag("%zz%2g"), "%zz%2g");
  EXPECT_EQ(decode_tag("%2a%2A"), "**");
}

}  // namespace
}  // namespace ebbtide
