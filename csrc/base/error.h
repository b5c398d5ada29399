#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/bytes.h"

// The typed exceptions of the core. They never leave a library: api/ turns them into codes.
namespace ebbtide {

// What refused, for callers that advise in words of their own: a message is neutral, and names settings and variables
// but no language's syntax. The numbers are those of ebbtide_cause.
enum class Cause {
  kOther = 0,
  kHostMemory = 1,     // RAM, the container or host_limit
  kPinnedLimit = 2,    // pinned_limit
  kPinning = 3,        // the system pins no more
  kDiskDirectory = 4,  // the folder of disk backups, or its disk
  kDevice = 5,         // the device itself is full
  kDeviceLimit = 6,    // device_limit
  kDeviceMargin = 7,   // device_margin
  kBackupView = 8,     // a view of a backup is open
  kLmsLimit = 9,       // the limit of large model support
  kLmsHostLimit = 10,  // its limit for host memory
  kLent = 11,          // other processes use the memory
};

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, Cause what_refused = Cause::kOther)
      : std::runtime_error(message), cause(what_refused) {}
  Cause cause;
};

// Null, an absurd size, a malformed tag, a pointer that ebbtide does not own.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

class StateError : public Error {
 public:
  using Error::Error;
};

// Another operation holds a tag, and the caller does not wait.
class BusyError : public StateError {
 public:
  using StateError::StateError;
};

// An operation was refused since a stream capture is under way: it may be asked for again when that has ended.
class CaptureError : public StateError {
 public:
  using StateError::StateError;
};

// The requested, the free and the allowed bytes.
struct Shortage {
  uint64_t requested_bytes = 0;
  uint64_t free_bytes = 0;
  uint64_t limit_bytes = kUnlimited;
};

class OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& message, int device_ordinal, Shortage shortage_numbers, Cause what_refused)
      : Error(message, what_refused), device(device_ordinal), shortage(shortage_numbers) {}
  int device;
  Shortage shortage;
};

class StoreError : public Error {
 public:
  StoreError(const std::string& message, Shortage shortage_numbers, Cause what_refused = Cause::kOther)
      : Error(message, what_refused), shortage(shortage_numbers) {}
  Shortage shortage;
};

class DriverError : public Error {
 public:
  DriverError(const std::string& message, std::string call_name, int result_code, std::string argument_text)
      : Error(message), call(std::move(call_name)), code(result_code), arguments(std::move(argument_text)) {}
  std::string call;
  int code;
  std::string arguments;
};

}  // namespace ebbtide
