#include "api/guard.h"

#include <cstring>
#include <new>

#include "base/text.h"
#include "driver/driver.h"

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
              static_cast<int>(Cause::kLmsHostLimit) == EBBTIDE_CAUSE_LMS_HOST_LIMIT &&
              static_cast<int>(Cause::kLent) == EBBTIDE_CAUSE_LENT);

ebbtide_status translate_exception(ebbtide_error* error) noexcept {
  ebbtide_error unwanted;
  ebbtide_error& to = error != nullptr ? *error : unwanted;
  const auto fill = [&](ebbtide_status status, const char* message, Cause cause = Cause::kOther) {
    to.status = status;
    to.cause = static_cast<int32_t>(cause);
    copy_text(to.message, sizeof to.message, message);
    return status;
  };
  const auto fill_shortage = [&](int device, const Shortage& shortage) {
    to.device = device;
    to.requested_bytes = shortage.requested_bytes;
    to.free_bytes = shortage.free_bytes;
    to.limit_bytes = shortage.limit_bytes;
  };
  try {
    throw;
  } catch (const InvalidArgument& exception) {
    return fill(EBBTIDE_INVALID_ARGUMENT, exception.what());
  } catch (const OutOfMemory& exception) {
    fill_shortage(exception.device, exception.shortage);
    return fill(EBBTIDE_OUT_OF_MEMORY, exception.what(), exception.cause);
  } catch (const StateError& exception) {
    return fill(EBBTIDE_STATE_ERROR, exception.what(), exception.cause);
  } catch (const StoreError& exception) {
    fill_shortage(-1, exception.shortage);
    return fill(EBBTIDE_STORE_ERROR, exception.what(), exception.cause);
  } catch (const DriverError& exception) {
    to.code = exception.code;
    copy_text(to.call, sizeof to.call, name_in_use(exception.call.c_str()));
    copy_text(to.arguments, sizeof to.arguments, exception.arguments.c_str());
    return fill(EBBTIDE_DRIVER_ERROR, exception.what());
  } catch (const std::bad_alloc&) {
    return fill(EBBTIDE_STORE_ERROR, "the process has no host memory left");
  } catch (const std::exception& exception) {
    return fill(EBBTIDE_INTERNAL_ERROR, exception.what());
  } catch (...) {
    return fill(EBBTIDE_INTERNAL_ERROR, "an unknown exception");
  }
}

void require(bool condition, const char* message) {
  if (!condition) throw InvalidArgument(message);
}

void require_overflow() {
  require_not_forked();
  driver();  // known only once it is loaded
  if (speaks_hip()) {
    throw StateError(
        "overflow to the host does not work with HIP: leave overflow, demote and host_pool out, or pause tags to make "
        "room");
  }
}

void copy_text(char* to, size_t capacity, const char* from) noexcept {
  const std::string_view kept = cut_utf8(from, capacity - 1);
  std::memcpy(to, kept.data(), kept.size());
  to[kept.size()] = '\0';
}

}  // namespace ebbtide::api
