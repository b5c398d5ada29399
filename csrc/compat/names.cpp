#include "compat/names.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "api/ebbtide_settings.h"
#include "base/log.h"

namespace ebbtide::compat {
namespace {

// Every name that was given out. A list that only grows, without a lock: a program has few tags, and may fork at any
// moment. Leaked on purpose.
struct Name {
  std::string tag, text;
  const Name* next = nullptr;
};
constinit std::atomic<const Name*> names{nullptr};

const Name* find_name(const char* tag) noexcept {
  const Name* name = names.load(std::memory_order_acquire);
  while (name != nullptr && name->tag != tag) name = name->next;
  return name;
}

}  // namespace

bool encode(const char* call, const char* name, char* tag) noexcept {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const size_t size = name == nullptr ? 0 : std::strlen(name);
  if (ebbtide_encode_tag(name, size, tag, &error) == EBBTIDE_OK) return true;
  log_line(LogLevel::kError, {call, ": ", name == nullptr ? "the tag is null" : error.message});
  return false;
}

const char* decode(const char* tag) noexcept {
  if (const Name* const known = find_name(tag)) return known->text.c_str();
  try {
    size_t length = 0;
    if (ebbtide_decode_tag(tag, nullptr, 0, &length, nullptr) != EBBTIDE_OK) return "";
    auto name = std::make_unique<Name>(Name{tag, std::string(length, '\0')});
    ebbtide_decode_tag(tag, name->text.data(), length + 1, &length, nullptr);
    name->next = names.load(std::memory_order_relaxed);
    while (!names.compare_exchange_weak(name->next, name.get(), std::memory_order_release)) continue;
    return name.release()->text.c_str();
  } catch (const std::bad_alloc&) {
    log_line(LogLevel::kError, {"tms_get_current_tag: the process has no host memory left"});
    return "";
  }
}

}  // namespace ebbtide::compat
