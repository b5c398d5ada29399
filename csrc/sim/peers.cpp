#include "sim/peers.h"

#include "sim/entry.h"
#include "sim/simulator.h"

namespace ebbtide::sim {

void Peers::set_reach(int device, int peer, bool is_reached) {
  if (is_reached) {
    apart_.erase({device, peer});
  } else {
    apart_.insert({device, peer});
  }
}

void Peers::drop_context(uint64_t context) {
  std::erase_if(enabled_, [&](const auto& pair) { return pair.first == context || pair.second == context; });
}

void Peers::reset() {
  apart_.clear();
  enabled_.clear();
}

namespace {

CUresult can_access(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  if (canAccessPeer == nullptr) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  if (!simulator().physical.has_device(dev) || !simulator().physical.has_device(peerDev))
    return CUDA_ERROR_INVALID_DEVICE;
  *canAccessPeer = simulator().peers.reaches(dev, peerDev) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult enable_access(CUcontext peerContext, unsigned int Flags) {
  if (Flags != 0) return CUDA_ERROR_INVALID_VALUE;
  Lock lock(simulator().mutex);
  const uint64_t own = current_context(lock);
  const uint64_t peer = id_of(peerContext);
  if (!simulator().contexts.is_active(peer)) return CUDA_ERROR_INVALID_CONTEXT;
  Peers& peers = simulator().peers;
  if (!peers.reaches(device_of_context(lock, own), device_of_context(lock, peer)))
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  return peers.enable(own, peer) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

}  // namespace
}  // namespace ebbtide::sim

using namespace ebbtide::sim;

EBBTIDE_SIM_EXPORT CUresult cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  EBBTIDE_SIM_FORWARD(cuDeviceCanAccessPeer, kDriver, can_access, canAccessPeer, dev, peerDev);
}

EBBTIDE_SIM_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags) {
  EBBTIDE_SIM_FORWARD(cuCtxEnablePeerAccess, kContext, enable_access, peerContext, Flags);
}
