// What blocks.cu uses of CUDA, in clang's HIP without AMD's headers and libraries. tools/make_code_objects.py has it
// included before the source.
#pragma once

// No standard headers here either: block_types.h takes the types that it has for NVRTC.
#define __CUDACC_RTC__
using size_t = decltype(sizeof 0);

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
// CUDA's first bound. HIP counts something else in the second; the kernels use few registers.
#define EBBTIDE_FIRST(first, ...) first
#define __launch_bounds__(...) __attribute__((amdgpu_flat_work_group_size(1, EBBTIDE_FIRST(__VA_ARGS__, 0))))

// As --device-as-default-execution-space does for NVRTC.
#pragma clang force_cuda_host_device begin

// --- indices --------------------------------------------------------------------------------------------------------

struct ThreadIndex {
  __declspec(property(get = get_x)) unsigned x;
  static unsigned get_x() { return __builtin_amdgcn_workitem_id_x(); }
};
struct BlockIndex {
  __declspec(property(get = get_x)) unsigned x;
  __declspec(property(get = get_y)) unsigned y;
  static unsigned get_x() { return __builtin_amdgcn_workgroup_id_x(); }
  static unsigned get_y() { return __builtin_amdgcn_workgroup_id_y(); }
};
// The hardware counts threads, and a CTA is one thread high.
struct GridSize {
  __declspec(property(get = get_y)) unsigned y;
  static unsigned get_y() { return __builtin_amdgcn_grid_size_y(); }
};
constexpr ThreadIndex threadIdx;
constexpr BlockIndex blockIdx;
constexpr GridSize gridDim;

// --- memory ---------------------------------------------------------------------------------------------------------

using ulonglong2 = unsigned long long __attribute__((ext_vector_type(2)));
inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y) { return {x, y}; }

#define EBBTIDE_GLOBAL __attribute__((address_space(1)))
inline ulonglong2 __ldcs(const ulonglong2* from) {
  return __builtin_nontemporal_load((const EBBTIDE_GLOBAL ulonglong2*)from);
}
inline void __stcs(ulonglong2* to, ulonglong2 value) {
  __builtin_nontemporal_store(value, (EBBTIDE_GLOBAL ulonglong2*)to);
}
// The fence before it has invalidated the caches.
inline ulonglong2 __ldcv(const ulonglong2* from) { return __ldcs(from); }

// Waits until this wave's stores, and what a fence writes back from a cache, have arrived. The compiler places such
// waits too, but drops them where it sees no store: it does not count the write-back as one.
inline void await_stores() {
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#ifdef __GFX11__
  asm volatile("s_waitcnt_vscnt null, 0" ::: "memory");
#endif
}

inline void __threadfence_system() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  await_stores();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}

// --- threads of a CTA -----------------------------------------------------------------------------------------------

// After CUDA's barrier, one thread's fence covers the stores of all. A fence for the work group does not wait for
// stores on gfx9, where the waves share a first-level cache, so each wave waits itself.
inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  await_stores();
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

inline int __syncthreads_or(int own) {
  __shared__ int any;
  if (threadIdx.x == 0) any = 0;
  __syncthreads();
  if (own != 0) __hip_atomic_store(&any, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  __syncthreads();
  return any;
}

// Within 32 lanes. A wave has 32 or 64; all are active.
inline unsigned long long __shfl_down_sync(unsigned /*lanes*/, unsigned long long own, unsigned distance) {
  const unsigned lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
  const unsigned from = lane % 32 + distance < 32 ? lane + distance : lane;
  const unsigned low = __builtin_amdgcn_ds_bpermute(from * 4, static_cast<unsigned>(own));
  const unsigned high = __builtin_amdgcn_ds_bpermute(from * 4, static_cast<unsigned>(own >> 32));
  return static_cast<unsigned long long>(high) << 32 | low;
}
