// Copies and fills.
//
// A range is looked up at the call and again when the work runs. If it does not exist at the call, the call returns an
// invalid value. If it has been unmapped by the time the work runs, the context gets the sticky error "illegal
// address". Bytes move without the lock, between files and the caller's memory; the spans hold the blocks meanwhile.
#include <algorithm>
#include <vector>

#include "sim/entry.h"
#include "sim/simulator.h"
#include "sim/spans.h"

namespace ebbtide::sim {
namespace {

constexpr uint64_t kPatternBytes = 1 << 20;

template <typename Value>
bool fill(const Spans& to, Value value) {
  std::vector<Value> pattern(kPatternBytes / sizeof(Value), value);
  for (const Span& span : to) {
    for (uint64_t done = 0; done < span.size; done += kPatternBytes) {
      const uint64_t step = std::min(kPatternBytes, span.size - done);
      if (!move_piece({span.block, span.position + done, step},
                      {nullptr, reinterpret_cast<uint64_t>(pattern.data()), step})) {
        return false;
      }
    }
  }
  return true;
}

struct Copy {
  Address to;
  Address from;
  uint64_t size;
  int device;

  bool is_allowed(Lock& lock) const {
    const HostMemory& pinned = simulator().host_memory;
    if (pinned.leaves_registered(to.value, size) || pinned.leaves_registered(from.value, size)) return false;
    return resolve(lock, to, size, AccessKind::kWrite, device) && resolve(lock, from, size, AccessKind::kRead, device);
  }

  bool run(Lock& lock) const {
    auto target = resolve(lock, to, size, AccessKind::kWrite, device);
    auto source = resolve(lock, from, size, AccessKind::kRead, device);
    if (!target || !source) return false;
    const Unlocked unlocked(lock);
    return move_bytes(*target, *source, size);
  }
};

CUresult copy_now(Address to, Address from, size_t size) {
  if (size == 0) return CUDA_SUCCESS;
  Lock lock(simulator().mutex);
  StreamRef legacy;
  Streams& streams = simulator().streams;
  if (const CUresult wrong = streams.find(lock, nullptr, legacy); wrong != CUDA_SUCCESS) return wrong;
  const Copy copy{to, from, size, device_of_context(lock, 0)};
  if (!copy.is_allowed(lock)) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult failed = streams.synchronize(lock, legacy); failed != CUDA_SUCCESS) return failed;
  return copy.run(lock) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult copy_later(Address to, Address from, size_t size, CUstream handle) {
  Lock lock(simulator().mutex);
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, handle, stream); wrong != CUDA_SUCCESS) return wrong;
  const Copy copy{to, from, size, device_of_context(lock, stream->context)};
  if (size == 0) return CUDA_SUCCESS;
  if (!copy.is_allowed(lock)) return CUDA_ERROR_INVALID_VALUE;
  return simulator().streams.submit(
      lock, stream, [copy](Lock& held) { return copy.run(held) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS; });
}

CUresult htod(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount) {
  return copy_now({dstDevice, true, true}, {reinterpret_cast<uint64_t>(srcHost), false}, ByteCount);
}

CUresult dtoh(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
  return copy_now({reinterpret_cast<uint64_t>(dstHost), false}, {srcDevice, true, true}, ByteCount);
}

CUresult htod_async(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount, CUstream hStream) {
  return copy_later({dstDevice, true, true}, {reinterpret_cast<uint64_t>(srcHost), false}, ByteCount, hStream);
}

CUresult dtoh_async(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  return copy_later({reinterpret_cast<uint64_t>(dstHost), false}, {srcDevice, true, true}, ByteCount, hStream);
}

CUresult dtod_async(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount, CUstream hStream) {
  return copy_later({dstDevice, true, true}, {srcDevice, true, true}, ByteCount, hStream);
}

CUresult dtod(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  // The driver does not wait for a copy within devices.
  return dtod_async(dstDevice, srcDevice, ByteCount, nullptr);
}

CUresult copy_any(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  return copy_now({dst, false, true}, {src, false, true}, ByteCount);
}

CUresult copy_any_async(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  return copy_later({dst, false, true}, {src, false, true}, ByteCount, hStream);
}

template <typename Value>
CUresult fill_later(CUdeviceptr dstDevice, Value value, size_t N, CUstream hStream) {
  Lock lock(simulator().mutex);
  StreamRef stream;
  if (const CUresult wrong = simulator().streams.find(lock, hStream, stream); wrong != CUDA_SUCCESS) return wrong;
  const int device = device_of_context(lock, stream->context);
  const Address to{dstDevice, true};
  if (N == 0) return CUDA_SUCCESS;
  if (dstDevice % sizeof(Value) != 0 || N > UINT64_MAX / sizeof(Value)) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t size = N * sizeof(Value);
  if (!resolve(lock, to, size, AccessKind::kWrite, device)) return CUDA_ERROR_INVALID_VALUE;
  return simulator().streams.submit(lock, stream, [to, value, size, device](Lock& held) {
    const auto target = resolve(held, to, size, AccessKind::kWrite, device);
    if (!target) return CUDA_ERROR_ILLEGAL_ADDRESS;
    const Unlocked unlocked(held);
    return fill(*target, value) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
  });
}

// The driver does not wait for a fill of device memory either.
template <typename Value>
CUresult fill_by_default(CUdeviceptr dstDevice, Value value, size_t N) {
  return fill_later(dstDevice, value, N, nullptr);
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuMemcpyHtoD(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount) {
  EBBTIDE_SIM_FORWARD(cuMemcpyHtoD, kContext, htod, dstDevice, srcHost, ByteCount);
}

EBBTIDE_SIM_EXPORT CUresult cuMemcpyDtoH(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount) {
  EBBTIDE_SIM_FORWARD(cuMemcpyDtoH, kContext, dtoh, dstHost, srcDevice, ByteCount);
}

EBBTIDE_SIM_EXPORT CUresult cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void* srcHost, size_t ByteCount,
                                              CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemcpyHtoDAsync, kDriver, htod_async, dstDevice, srcHost, ByteCount, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemcpyDtoHAsync(void* dstHost, CUdeviceptr srcDevice, size_t ByteCount,
                                              CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemcpyDtoHAsync, kDriver, dtoh_async, dstHost, srcDevice, ByteCount, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount,
                                              CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemcpyDtoDAsync, kDriver, dtod_async, dstDevice, srcDevice, ByteCount, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemsetD8Async, kDriver, fill_later, dstDevice, uc, N, hStream);
}

// The next eight are for programs (program_functions.def).

EBBTIDE_SIM_EXPORT CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount) {
  EBBTIDE_SIM_FORWARD(cuMemcpy, kContext, copy_any, dst, src, ByteCount);
}

EBBTIDE_SIM_EXPORT CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t ByteCount, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemcpyAsync, kDriver, copy_any_async, dst, src, ByteCount, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemcpyDtoD(CUdeviceptr dstDevice, CUdeviceptr srcDevice, size_t ByteCount) {
  EBBTIDE_SIM_FORWARD(cuMemcpyDtoD, kContext, dtod, dstDevice, srcDevice, ByteCount);
}

EBBTIDE_SIM_EXPORT CUresult cuMemsetD8(CUdeviceptr dstDevice, unsigned char uc, size_t N) {
  EBBTIDE_SIM_FORWARD(cuMemsetD8, kContext, fill_by_default, dstDevice, uc, N);
}

EBBTIDE_SIM_EXPORT CUresult cuMemsetD16(CUdeviceptr dstDevice, unsigned short us, size_t N) {
  EBBTIDE_SIM_FORWARD(cuMemsetD16, kContext, fill_by_default, dstDevice, us, N);
}

EBBTIDE_SIM_EXPORT CUresult cuMemsetD32(CUdeviceptr dstDevice, unsigned int ui, size_t N) {
  EBBTIDE_SIM_FORWARD(cuMemsetD32, kContext, fill_by_default, dstDevice, ui, N);
}

EBBTIDE_SIM_EXPORT CUresult cuMemsetD16Async(CUdeviceptr dstDevice, unsigned short us, size_t N, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemsetD16Async, kDriver, fill_later, dstDevice, us, N, hStream);
}

EBBTIDE_SIM_EXPORT CUresult cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, size_t N, CUstream hStream) {
  EBBTIDE_SIM_FORWARD(cuMemsetD32Async, kDriver, fill_later, dstDevice, ui, N, hStream);
}

EBBTIDE_SIM_PLAIN_NAME(cuMemcpyHtoD);
EBBTIDE_SIM_PLAIN_NAME(cuMemcpyDtoH);
EBBTIDE_SIM_PLAIN_NAME(cuMemcpyHtoDAsync);
EBBTIDE_SIM_PLAIN_NAME(cuMemcpyDtoHAsync);
EBBTIDE_SIM_PLAIN_NAME(cuMemcpyDtoDAsync);
EBBTIDE_SIM_PLAIN_NAME(cuMemcpyDtoD);
EBBTIDE_SIM_PLAIN_NAME(cuMemsetD8);
EBBTIDE_SIM_PLAIN_NAME(cuMemsetD16);
EBBTIDE_SIM_PLAIN_NAME(cuMemsetD32);
