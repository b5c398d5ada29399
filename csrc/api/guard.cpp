#include "api/guard.h"

#include <cstring>
#include <new>
#include <string>

#include "base/error.h"
#include "base/log.h"

namespace ebbtide::api {

static_assert(static_cast<int>(Cause::kHostMemory) == EBBTIDE_CAUSE_HOST_MEMORY &&
              static_cast<int>(Cause::kPinnedLimit) == EBBTIDE_CAUSE_PINNED_LIMIT &&
              static_cast<int>(Cause::kPinning) == EBBTIDE_CAUSE_PINNING &&
              static_cast<int>(Cause::kDiskDirectory) == EBBTIDE_CAUSE_DISK_DIRECTORY &&
              static_cast<int>(Cause::kDevice) == EBBTIDE_CAUSE_DEVICE &&
              static_cast<int>(Cause::kDeviceLimit) == EBBTIDE_CAUSE_DEVICE_LIMIT &&
              static_cast<int>(Cause::kDeviceMargin) == EBBTIDE_CAUSE_DEVICE_MARGIN &&
              static_cast<int>(Cause::kBackupView) == EBBTIDE_CAUSE_BACKUP_VIEW &&
              static_cast<int>(Cause::kLmsLimit) == EBBTIDE_CAUSE_LMS_LIMIT &&
              static_cast<int>(Cause::kLmsHostLimit) == EBBTIDE_CAUSE_LMS_HOST_LIMIT);

namespace {

bool has_room(const ebbtide_error* error) noexcept { return error != nullptr && error->struct_size >= kLeastError; }

ebbtide_status fill(ebbtide_error* error, ebbtide_status status, const char* message,
                    Cause cause = Cause::kOther) noexcept {
  if (!has_room(error)) return status;
  error->status = status;
  copy_text(error->message, sizeof error->message, message);
  const bool has_cause = error->struct_size >= offsetof(ebbtide_error, cause) + sizeof(ebbtide_error::cause);
  if (has_cause) error->cause = static_cast<int32_t>(cause);
  return status;
}

void fill_shortage(ebbtide_error* error, int device, const Shortage& shortage) noexcept {
  if (!has_room(error)) return;
  error->device = device;
  error->requested_bytes = shortage.requested_bytes;
  error->free_bytes = shortage.free_bytes;
  error->limit_bytes = shortage.limit_bytes;
}

}  // namespace

void clear(ebbtide_error* error) noexcept {
  if (!has_room(error)) return;
  const ebbtide_error empty = EBBTIDE_ERROR_INIT;
  const size_t given = error->struct_size;
  std::memcpy(static_cast<void*>(error), &empty, std::min(given, sizeof empty));
  error->struct_size = given;
}

ebbtide_status translate_exception(ebbtide_error* error) noexcept {
  try {
    throw;
  } catch (const InvalidArgument& exception) {
    return fill(error, EBBTIDE_INVALID_ARGUMENT, exception.what());
  } catch (const OutOfMemory& exception) {
    fill_shortage(error, exception.device, exception.shortage);
    return fill(error, EBBTIDE_OUT_OF_MEMORY, exception.what(), exception.cause);
  } catch (const StateError& exception) {
    return fill(error, EBBTIDE_STATE_ERROR, exception.what(), exception.cause);
  } catch (const StoreError& exception) {
    fill_shortage(error, -1, exception.shortage);
    return fill(error, EBBTIDE_STORE_ERROR, exception.what(), exception.cause);
  } catch (const DriverError& exception) {
    if (has_room(error)) {
      error->code = exception.code;
      copy_text(error->call, sizeof error->call, exception.call.c_str());
      copy_text(error->arguments, sizeof error->arguments, exception.arguments.c_str());
    }
    return fill(error, EBBTIDE_DRIVER_ERROR, exception.what());
  } catch (const std::bad_alloc&) {
    return fill(error, EBBTIDE_STORE_ERROR, "the process has no host memory left");
  } catch (const std::exception& exception) {
    return fill(error, EBBTIDE_INTERNAL_ERROR, exception.what());
  } catch (...) {
    return fill(error, EBBTIDE_INTERNAL_ERROR, "an unknown exception");
  }
}

void require(bool condition, const char* message) {
  if (!condition) throw InvalidArgument(message);
}

void require_size(size_t given, size_t least, const char* name) {
  if (given >= least) return;
  throw InvalidArgument(std::string(name) + ".struct_size is " + std::to_string(given) + ", at least " +
                        std::to_string(least) + " is needed: initialise it with its _INIT macro");
}

void copy_text(char* to, size_t capacity, const char* from) noexcept {
  size_t length = std::strlen(from);
  if (length >= capacity) {
    length = capacity - 1;
    while (length > 0 && (static_cast<unsigned char>(from[length]) & 0xC0) == 0x80) --length;
  }
  std::memcpy(to, from, length);
  to[length] = '\0';
}

}  // namespace ebbtide::api
