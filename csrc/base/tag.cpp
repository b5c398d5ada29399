#include "base/tag.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string>

#include "base/error.h"
#include "base/text.h"

namespace ebbtide {
namespace {

struct Range {
  char32_t first, last;
};

// Unicode's categories Cc, Cf, Cs, Co, Zl, Zp, Zs except U+0020, its Default_Ignorable_Code_Point, its noncharacters,
// and the blank U+2800. Not unassigned characters, since new letters come each year.
// tests/python/test_saver_tags.py compares it with Python's tables.
constexpr Range kUnseen[] = {
    {0x0, 0x1F},         {0x7F, 0xA0},       {0xAD, 0xAD},       {0x34F, 0x34F},     {0x600, 0x605},
    {0x61C, 0x61C},      {0x6DD, 0x6DD},     {0x70F, 0x70F},     {0x890, 0x891},     {0x8E2, 0x8E2},
    {0x115F, 0x1160},    {0x1680, 0x1680},   {0x17B4, 0x17B5},   {0x180B, 0x180F},   {0x2000, 0x200F},
    {0x2028, 0x202F},    {0x205F, 0x206F},   {0x2800, 0x2800},   {0x3000, 0x3000},   {0x3164, 0x3164},
    {0xD800, 0xF8FF},    {0xFDD0, 0xFDEF},   {0xFE00, 0xFE0F},   {0xFEFF, 0xFEFF},   {0xFFA0, 0xFFA0},
    {0xFFF0, 0xFFFB},    {0xFFFE, 0xFFFF},   {0x110BD, 0x110BD}, {0x110CD, 0x110CD}, {0x13430, 0x1343F},
    {0x1BCA0, 0x1BCA3},  {0x1D173, 0x1D17A}, {0x1FFFE, 0x1FFFF}, {0x2FFFE, 0x2FFFF}, {0x3FFFE, 0x3FFFF},
    {0x4FFFE, 0x4FFFF},  {0x5FFFE, 0x5FFFF}, {0x6FFFE, 0x6FFFF}, {0x7FFFE, 0x7FFFF}, {0x8FFFE, 0x8FFFF},
    {0x9FFFE, 0x9FFFF},  {0xAFFFE, 0xAFFFF}, {0xBFFFE, 0xBFFFF}, {0xCFFFE, 0xCFFFF}, {0xDFFFE, 0xE0FFF},
    {0xEFFFE, 0x10FFFF},
};

bool is_reserved(char32_t character) noexcept { return character == '*' || character == '/'; }

bool is_unseen(char32_t character) noexcept {
  const Range* const found = std::lower_bound(std::begin(kUnseen), std::end(kUnseen), character,
                                              [](const Range& range, char32_t wanted) { return range.last < wanted; });
  return found != std::end(kUnseen) && character >= found->first;
}

}  // namespace

bool is_tag_character(char32_t character) noexcept { return !is_reserved(character) && !is_unseen(character); }

void check_tag_name(std::string_view name) {
  if (name.empty()) throw InvalidArgument("a tag must not be empty");
  if (!is_utf8(name)) throw InvalidArgument("a tag must be valid UTF-8, and " + in_quotes(name) + " is not");
  if (name.size() > kTagBytesMax) {
    throw InvalidArgument("a tag is at most " + std::to_string(kTagBytesMax) + " bytes of UTF-8; this one has " +
                          std::to_string(name.size()) + ": " + in_quotes(name));
  }
  for (size_t at = 0; at < name.size();) {
    const char32_t character = next_character(name, at);
    if (is_reserved(character)) {
      throw InvalidArgument("'*' and '/' are reserved in tags: " + in_quotes(name));
    }
    if (!is_unseen(character)) continue;
    char code[16];
    std::snprintf(code, sizeof code, "U+%04X", static_cast<unsigned>(character));
    throw InvalidArgument("a tag has no characters that can't be seen, and " + in_quotes(name) + " has " + code);
  }
  if (name.front() == ' ' || name.back() == ' ') {
    throw InvalidArgument("a tag neither begins nor ends with a space: " + in_quotes(name));
  }
}

}  // namespace ebbtide
