#include <sys/types.h>

#include <cstdint>
#include <cstring>

#include "api/ebbtide.h"
#include "base/log.h"
#include "compat/policy.h"

// The two functions that torch_memory_saver gives to torch's pluggable allocator. What they allocate has the tag and
// the backup of the calling thread.
using namespace ebbtide;

extern "C" {

EBBTIDE_API void* tms_torch_malloc(ssize_t size_bytes, int device, void* stream) {
  const ebbtide_thread_policy own = compat::policy_in_force();
  ebbtide_policy policy = EBBTIDE_POLICY_INIT;
  policy.backup = own.backup;
  policy.retain = own.retain;
  int32_t slot = -1;
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  if (size_bytes <= 0) return nullptr;
  if (ebbtide_bind_slot(own.tag, &policy, device, &slot, &error) != EBBTIDE_OK) {
    log_line(LogLevel::kError, {"tms_torch_malloc: ", error.message});
    return nullptr;
  }
  return ebbtide_slot_alloc(slot, static_cast<uint64_t>(size_bytes), stream);
}

EBBTIDE_API void tms_torch_free(void* address, ssize_t /*size_bytes*/, int /*device*/, void* /*stream*/) {
  ebbtide_slot_free(address);
}

}  // extern "C"
