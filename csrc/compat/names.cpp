#include "compat/names.h"

#include <cstring>
#include <string>
#include <utility>

#include "api/ebbtide_settings.h"
#include "base/growing_list.h"
#include "base/log.h"

namespace ebbtide::compat {
namespace {

struct Name {
  std::string tag, text;
};
// Every name that was given out: a program has few tags.
constinit GrowingList<Name> names;

}  // namespace

bool encode(const char* call, const char* name, char (&tag)[EBBTIDE_TAG_MAX + 1]) noexcept {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const size_t size = name == nullptr ? 0 : std::strlen(name);
  if (ebbtide_encode_tag(name, size, tag, &error) == EBBTIDE_OK) return true;
  log_line(LogLevel::kError, {call, ": ", name == nullptr ? "the tag is null" : error.message});
  return false;
}

const char* decode(const char* tag) noexcept {
  if (const Name* const known = names.find([&](const Name& each) { return each.tag == tag; }))
    return known->text.c_str();
  try {
    size_t length = 0;
    if (ebbtide_decode_tag(tag, nullptr, 0, &length, nullptr) != EBBTIDE_OK) return "";
    std::string text(length, '\0');
    ebbtide_decode_tag(tag, text.data(), length + 1, &length, nullptr);
    return names.add({tag, std::move(text)}).text.c_str();
  } catch (const std::bad_alloc&) {
    log_line(LogLevel::kError, {"tms_get_current_tag: the process has no host memory left"});
    return "";
  }
}

}  // namespace ebbtide::compat
