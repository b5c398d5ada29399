#include "torch/lms/transfer.h"

#include <stdexcept>

namespace ebbtide::lms {

// --- HostMemory ---

HostMemory HostMemory::take(int device, uint64_t size_bytes, std::string* problem) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  HostMemory taken;
  if (ebbtide_take_host_memory(device, size_bytes, &taken.address_, &error) != EBBTIDE_OK) *problem = error.message;
  return taken;
}

HostMemory& HostMemory::operator=(HostMemory&& other) noexcept {
  give_back();
  address_ = std::exchange(other.address_, nullptr);
  return *this;
}

void HostMemory::give_back() noexcept {
  if (address_ != nullptr) ebbtide_give_host_memory(std::exchange(address_, nullptr), nullptr);
}

// --- OwnedCopy ---

OwnedCopy OwnedCopy::begin(int device, void* to, const void* from, uint64_t size_bytes, int32_t direction, void* stream,
                           std::string* problem) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  OwnedCopy copy;
  if (ebbtide_begin_copy(device, to, from, size_bytes, direction, stream, &copy.handle_, &error) != EBBTIDE_OK)
    *problem = error.message;
  return copy;
}

OwnedCopy OwnedCopy::to_host(int device, const HostMemory& to, const void* from, uint64_t size_bytes, void* stream,
                             std::string* problem) {
  return begin(device, to.address(), from, size_bytes, EBBTIDE_TO_HOST, stream, problem);
}

OwnedCopy OwnedCopy::to_device(int device, void* to, const HostMemory& from, uint64_t size_bytes, void* stream,
                               std::string* problem) {
  return begin(device, to, from.address(), size_bytes, EBBTIDE_TO_DEVICE, stream, problem);
}

OwnedCopy& OwnedCopy::operator=(OwnedCopy&& other) noexcept {
  end();
  handle_ = std::exchange(other.handle_, nullptr);
  return *this;
}

void OwnedCopy::wait() {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  if (ebbtide_wait_for_copy(handle_, &error) != EBBTIDE_OK) throw std::runtime_error(error.message);
}

void OwnedCopy::come_before(void* stream) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  if (ebbtide_order_after_copy(handle_, stream, &error) != EBBTIDE_OK) throw std::runtime_error(error.message);
}

bool OwnedCopy::end(double* seconds, double* waited_seconds) noexcept {
  return handle_ == nullptr ||
         ebbtide_end_copy(std::exchange(handle_, nullptr), seconds, waited_seconds, nullptr) == EBBTIDE_OK;
}

// --- Transit ---

Transit& Transit::operator=(Transit&& other) noexcept {
  copy = OwnedCopy();  // first: it may still use the host's side
  host = std::move(other.host);
  copy = std::move(other.copy);
  size_bytes = other.size_bytes;
  is_arrival = other.is_arrival;
  is_prefetch = other.is_prefetch;
  waited_seconds = other.waited_seconds;
  return *this;
}

}  // namespace ebbtide::lms
