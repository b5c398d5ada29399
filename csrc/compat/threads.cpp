#include <cstring>
#include <string>

#include "api/ebbtide.h"
#include "api/ebbtide_settings.h"
#include "base/log.h"
#include "compat/backups.h"
#include "compat/names.h"
#include "compat/policy.h"
#include "compat/variables.h"

// What torch_memory_saver keeps for each thread, as the thread's policy. So a region of the saver shows here, too.
//
// The C API of torch_memory_saver has no error to return here. Nothing fails but for a wrong argument, which is
// reported in one line and changes nothing.
using namespace ebbtide;
using compat::variables;

namespace {

// The word of TMS's "cpu_backup_backend", also while there is no such backup; -1: that of the environment.
thread_local constinit int32_t own_backend = -1;

int32_t backend() noexcept { return own_backend >= 0 ? own_backend : variables().cpu_backup; }

bool is_on_cpu(int32_t backup) noexcept { return backup == EBBTIDE_BACKUP_RAM || backup == EBBTIDE_BACKUP_PINNED; }

void set_policy(const char* call, ebbtide_thread_policy policy) noexcept {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  policy.retain = policy.backup != EBBTIDE_BACKUP_NONE && compat::retains();
  if (ebbtide_set_thread_policy(&policy, &error) != EBBTIDE_OK) log_line(LogLevel::kError, {call, ": ", error.message});
}

}  // namespace

namespace ebbtide::compat {

ebbtide_thread_policy policy_in_force() noexcept {
  ebbtide_thread_policy policy = EBBTIDE_THREAD_POLICY_INIT;
  ebbtide_get_thread_policy(&policy, nullptr);
  const int32_t own_tagging = policy.tagging;
  if (own_tagging == EBBTIDE_TAGGING_UNSET) ebbtide_get_program_policy(&policy, nullptr);
  const bool is_programs = own_tagging == EBBTIDE_TAGGING_UNSET && policy.tagging == EBBTIDE_TAGGING_ON;
  const bool has_own_tag = own_tagging != EBBTIDE_TAGGING_UNSET && policy.tag[0] != '\0';
  if (is_programs || has_own_tag) return policy;
  policy.tagging = own_tagging;
  if (own_tagging == EBBTIDE_TAGGING_UNSET)
    policy.tagging = variables().is_enabled ? EBBTIDE_TAGGING_ON : EBBTIDE_TAGGING_OFF;
  policy.backup = variables().backup;
  policy.retain = false;
  std::strcpy(policy.tag, "default");
  return policy;
}

}  // namespace ebbtide::compat

using compat::policy_in_force;

extern "C" {

EBBTIDE_API void tms_set_interesting_region(bool is_on) {
  ebbtide_thread_policy policy = policy_in_force();
  policy.tagging = is_on ? EBBTIDE_TAGGING_ON : EBBTIDE_TAGGING_OFF;
  set_policy("tms_set_interesting_region", policy);
}
EBBTIDE_API bool tms_get_interesting_region() { return policy_in_force().tagging == EBBTIDE_TAGGING_ON; }

EBBTIDE_API void tms_set_current_tag(const char* tag) {
  ebbtide_thread_policy policy = policy_in_force();
  if (compat::encode("tms_set_current_tag", tag, policy.tag)) set_policy("tms_set_current_tag", policy);
}
EBBTIDE_API const char* tms_get_current_tag() { return compat::decode(policy_in_force().tag); }

EBBTIDE_API void tms_set_enable_cpu_backup(bool is_on) {
  ebbtide_thread_policy policy = policy_in_force();
  if (is_on) policy.backup = backend();
  if (!is_on && is_on_cpu(policy.backup)) policy.backup = EBBTIDE_BACKUP_NONE;
  set_policy("tms_set_enable_cpu_backup", policy);
}
EBBTIDE_API bool tms_get_enable_cpu_backup() { return is_on_cpu(policy_in_force().backup); }

EBBTIDE_API void tms_set_cpu_backup_backend(const char* name) {
  const int32_t kind = compat::read_backend(name);
  if (kind < 0) {
    log_line(LogLevel::kError, {"tms_set_cpu_backup_backend: the backend is pinned or mmap, not ", name});
    return;
  }
  own_backend = kind;
  ebbtide_thread_policy policy = policy_in_force();
  if (!is_on_cpu(policy.backup)) return;
  policy.backup = kind;
  set_policy("tms_set_cpu_backup_backend", policy);
}
EBBTIDE_API const char* tms_get_cpu_backup_backend() {
  const int32_t backup = policy_in_force().backup;
  return (is_on_cpu(backup) ? backup : backend()) == EBBTIDE_BACKUP_RAM ? "mmap" : "pinned";
}

EBBTIDE_API void tms_set_enable_disk_backup(bool is_on) {
  ebbtide_thread_policy policy = policy_in_force();
  if (is_on) {
    compat::use_disk_directory();
    policy.backup = EBBTIDE_BACKUP_DISK;
  } else if (policy.backup == EBBTIDE_BACKUP_DISK) {
    policy.backup = EBBTIDE_BACKUP_NONE;
  }
  set_policy("tms_set_enable_disk_backup", policy);
}
EBBTIDE_API bool tms_get_enable_disk_backup() { return policy_in_force().backup == EBBTIDE_BACKUP_DISK; }

}  // extern "C"
