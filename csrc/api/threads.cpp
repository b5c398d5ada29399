#include <cstring>

#include "api/ebbtide.h"
#include "api/guard.h"
#include "api/view.h"
#include "core/allocate/thread_policy.h"

// Policies of threads.
using namespace ebbtide;
using api::guarded;
using api::require;

namespace {

static_assert(static_cast<int>(Tagging::kUnset) == EBBTIDE_TAGGING_UNSET);
static_assert(static_cast<int>(Tagging::kOff) == EBBTIDE_TAGGING_OFF);
static_assert(static_cast<int>(Tagging::kOn) == EBBTIDE_TAGGING_ON);
static_assert(kTagBytesMax == EBBTIDE_TAG_MAX);

constexpr const char* kName = "ebbtide_thread_policy";

ThreadPolicy read(const ebbtide_thread_policy* given) {
  const ebbtide_thread_policy all = EBBTIDE_THREAD_POLICY_INIT;
  if (given == nullptr) return {};
  const ebbtide_thread_policy read = api::read_struct(given, all, api::kLeastThreadPolicy, kName);
  require(read.tagging >= EBBTIDE_TAGGING_UNSET && read.tagging <= EBBTIDE_TAGGING_ON,
          "tagging is 0 (unset), 1 (off) or 2 (on)");
  require(read.retain == 0 || read.retain == 1, "retain is 0 or 1");
  require(std::memchr(read.tag, '\0', sizeof read.tag) != nullptr, "the tag does not end with NUL");
  ThreadPolicy policy{.tagging = static_cast<Tagging>(read.tagging),
                      .backup = api::read_backup(read.backup),
                      .retain = read.retain == 1,
                      .lease = read.lease};
  std::memcpy(policy.tag.data(), read.tag, sizeof read.tag);
  return policy;
}

void show(const ThreadPolicy& policy, ebbtide_thread_policy* to) {
  require(to != nullptr, "policy is null");
  ebbtide_thread_policy shown = EBBTIDE_THREAD_POLICY_INIT;
  shown.tagging = static_cast<int32_t>(policy.tagging);
  shown.backup = static_cast<int32_t>(policy.backup);
  shown.retain = policy.retain ? 1 : 0;
  shown.lease = policy.lease;
  std::memcpy(shown.tag, policy.tag.data(), sizeof shown.tag);
  api::write_struct(to, shown, api::kLeastThreadPolicy, kName);
}

}  // namespace

extern "C" {

ebbtide_status ebbtide_set_thread_policy(const ebbtide_thread_policy* policy, ebbtide_error* error) {
  return guarded(error, [&] { set_thread_policy(read(policy)); });
}

ebbtide_status ebbtide_get_thread_policy(ebbtide_thread_policy* policy, ebbtide_error* error) {
  return guarded(error, [&] { show(thread_policy(), policy); });
}

ebbtide_status ebbtide_get_program_policy(ebbtide_thread_policy* policy, ebbtide_error* error) {
  return guarded(error, [&] { show(program_policy(), policy); });
}

}  // extern "C"
