#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/bytes.h"

// The typed exceptions of the core. They never leave a library: api/ turns them into codes.
namespace ebbtide {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
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
  OutOfMemory(const std::string& message, int device_ordinal, Shortage shortage_numbers)
      : Error(message), device(device_ordinal), shortage(shortage_numbers) {}
  int device;
  Shortage shortage;
};

class StoreError : public Error {
 public:
  StoreError(const std::string& message, Shortage shortage_numbers) : Error(message), shortage(shortage_numbers) {}
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
