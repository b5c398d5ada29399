#include <cstdint>

#include "api/ebbtide.h"
#include "base/log.h"
#include "compat/backups.h"
#include "compat/names.h"

// pause and resume of torch_memory_saver. Where that ends the process, these return a code and write a line to stderr;
// an empty or unknown tag, or one that is already as wanted, is a success. They know nothing of torch's caches:
// saver.pause does.
using namespace ebbtide;

namespace {

// Of cudaError_t, which torch_memory_saver returns.
constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;
constexpr int kUnknown = 999;

using Operation = ebbtide_status (*)(const ebbtide_request*, ebbtide_report**, ebbtide_error*);

// name: null and "" are all tags.
int run(const char* call, Operation operation, const char* name, int32_t retain) noexcept {
  char tag[EBBTIDE_TAG_MAX + 1];
  const char* const tags[] = {tag};
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.missing_ok = 1;
  request.retain = retain;
  if (name != nullptr && *name != '\0') {
    if (!compat::encode(call, name, tag)) return kUnknown;
    request.tags = tags;
    request.tag_count = 1;
  }
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_status status = operation(&request, nullptr, &error);
  if (status == EBBTIDE_OK) return kSuccess;
  log_line(LogLevel::kError, {call, ": ", error.message});
  if (status == EBBTIDE_OUT_OF_MEMORY) return kOutOfMemory;
  return status == EBBTIDE_DRIVER_ERROR && error.code != 0 ? error.code : kUnknown;
}

// Whether its content stays in host memory, which a pointer can show.
bool is_kept_in_memory(const ebbtide_allocation_info& info) noexcept {
  return info.backup == EBBTIDE_BACKUP_RAM || info.backup == EBBTIDE_BACKUP_PINNED;
}

}  // namespace

extern "C" {

EBBTIDE_API int tms_pause(const char* tag) {
  compat::remake_disk_directory();
  return run("tms_pause", &ebbtide_pause, tag, -1);
}

// Without retaining, also pinned backups are freed, which ebbtide's own resumes keep.
EBBTIDE_API int tms_resume(const char* tag) {
  return run("tms_resume", &ebbtide_resume, tag, compat::retains() ? 1 : 0);
}

// Null for what has no backup in host memory: a resume that does not retain frees it. Until then the bytes stay there.
EBBTIDE_API uint8_t* tms_get_cpu_backup_pointer(const uint8_t* address, uint64_t size_bytes) {
  constexpr const char* kCall = "tms_get_cpu_backup_pointer";
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  ebbtide_allocation_info info{};
  bool is_found = false;
  void* bytes = nullptr;
  ebbtide_backup* backup = nullptr;
  if (ebbtide_find(address, &is_found, &info, &error) != EBBTIDE_OK || (is_found && !is_kept_in_memory(info)) ||
      ebbtide_retained_backup_of(address, size_bytes, &bytes, &backup, &error) != EBBTIDE_OK) {
    if (error.status != EBBTIDE_OK) log_line(LogLevel::kError, {kCall, ": ", error.message});
    return nullptr;
  }
  ebbtide_release_backup(backup);
  return static_cast<uint8_t*>(bytes);
}

}  // extern "C"
