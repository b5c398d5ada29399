// Items of a stream that wait for a number in memory or write one.
#include "sim/entry.h"
#include "sim/simulator.h"
#include "sim/spans.h"

namespace ebbtide::sim {
namespace {

bool is_met(unsigned flags, uint32_t number, uint32_t value) {
  switch (flags) {
    case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<int32_t>(number - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return number == value;
    case CU_STREAM_WAIT_VALUE_AND: return (number & value) != 0;
    default: return ~(number | value) != 0;
  }
}

// Looks the stream up, checks the address, and passes both to `use`, with the lock held.
template <typename Use>
CUresult with_number(CUstream handle, uint64_t address, AccessKind kind, Use use) {
  Lock lock(simulator().mutex);
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, handle, stream); wrong != CUDA_SUCCESS) return wrong;
  const int device = device_of_context(lock, stream->context);
  if (address % sizeof(uint32_t) != 0 || !resolve(lock, {address, true}, sizeof(uint32_t), kind, device)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  return use(lock, stream, device);
}

CUresult wait_value(CUstream hStream, CUdeviceptr addr, cuuint32_t value, unsigned flags) {
  if (flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
  return with_number(hStream, addr, AccessKind::kRead, [&](Lock& lock, const StreamRef& stream, int device) {
    // If the address is no longer valid, the wait ends too. The work then finds the same and fails.
    const auto is_ready = [=](Lock& held) {
      const auto number = read_number(held, addr, device);
      return !number || is_met(flags, *number, value);
    };
    const auto look = [=](Lock& held) {
      return read_number(held, addr, device) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
    };
    return simulator().streams.submit(lock, stream, look, {}, is_ready);
  });
}

CUresult write_value(CUstream hStream, CUdeviceptr addr, cuuint32_t value, unsigned flags) {
  if (flags > CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER) return CUDA_ERROR_INVALID_VALUE;
  return with_number(hStream, addr, AccessKind::kWrite, [&](Lock& lock, const StreamRef& stream, int device) {
    return simulator().streams.submit(lock, stream, [=](Lock& held) {
      return write_number(held, addr, value, device) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
    });
  });
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value,
                                                unsigned int flags) {
  EBBTIDE_SIM_FORWARD(cuStreamWaitValue32, kDriver, wait_value, stream, addr, value, flags);
}

EBBTIDE_SIM_EXPORT CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value,
                                                 unsigned int flags) {
  EBBTIDE_SIM_FORWARD(cuStreamWriteValue32, kDriver, write_value, stream, addr, value, flags);
}

EBBTIDE_SIM_PLAIN_NAME(cuStreamWaitValue32);
EBBTIDE_SIM_PLAIN_NAME(cuStreamWriteValue32);
