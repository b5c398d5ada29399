/* The simulator's control interface, for tests. It is plain C, and is found in libebbtide_sim.so by dlsym or ctypes.
 * The core never links it.
 *
 * Every function may be called at any time and from any thread, also before cuInit. All sizes are in bytes. */
#ifndef EBBTIDE_SIM_CONTROL_H
#define EBBTIDE_SIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Restores the state after load: all devices, handles, reservations, streams, events, rules and logs are removed, and
 * live mappings are unmapped. */
void ebbtide_sim_reset(void);

/* To be called before cuInit or after a reset: the number of devices (default 1, from EBBTIDE_SIM_DEVICES), and the
 * memory of each (default 1 GiB, from EBBTIDE_SIM_CAPACITY as bytes or "512MiB"). set_capacity also works later, and
 * then limits new memory only. */
void ebbtide_sim_set_device_count(int count);
void ebbtide_sim_set_capacity(int device, uint64_t bytes);

/* Whether `device` can access memory of `peer`, as cuDeviceCanAccessPeer answers (default: every device can). Applies
 * to access that is granted later. */
void ebbtide_sim_set_peers(int device, int peer, int is_reached);

/* The answer of cuDriverGetVersion (default 13000). cuGetProcAddress returns CUDA_ERROR_NOT_FOUND for newer
 * functions. */
void ebbtide_sim_set_driver_version(int version);

/* Makes cuGetProcAddress and dlsym-by-table act as if this function did not exist. NULL makes all exist again. */
void ebbtide_sim_hide_function(const char* name);

/* Makes call number k of `function` return `code` without any effect. The next call is number 1; NULL or "*" for the
 * function counts every call. `times` is the number of consecutive calls that fail from the k-th on; 0 means all that
 * follow. Several rules may be set. clear_failures removes all of them. */
void ebbtide_sim_fail(const char* function, uint64_t k, int code, uint64_t times);
void ebbtide_sim_clear_failures(void);

/* When asynchronous work runs. LATE (default): at the last moment that the driver allows, which is a synchronisation or
 * a poll (a poll runs one item and returns CUDA_ERROR_NOT_READY). EAGER: at once. RANDOM: a seeded random bit decides
 * for each item. */
enum { EBBTIDE_SIM_LATE = 0, EBBTIDE_SIM_EAGER = 1, EBBTIDE_SIM_RANDOM = 2 };
void ebbtide_sim_set_async(int mode, uint64_t seed);

/* Delays one function, so that a test can act in the middle of an operation; 0 removes the delay. Here and in
 * ebbtide_sim_fail, the name "ebbtide_deliver" means each piece of that kernel. A planted failure of a piece becomes
 * the context's sticky error. */
void ebbtide_sim_set_delay(const char* function, uint64_t microseconds);

/* The numbers of live objects. device_bytes is the physical memory of all devices that handles or mappings hold.
 * pinned_bytes is the memory of cuMemHostAlloc. */
typedef struct ebbtide_sim_counts {
  uint64_t reservations, handles, mappings, streams, events, pinned_blocks, registered_ranges, contexts_retained,
      queued_items, modules;
  uint64_t device_bytes, pinned_bytes;
} ebbtide_sim_counts;
void ebbtide_sim_live(ebbtide_sim_counts* counts);

/* The number of driver calls since load, reset or the last clear_log: calls of one function, or all calls if it is
 * NULL. */
uint64_t ebbtide_sim_calls(const char* function);
/* The log of calls, oldest first, at most the newest 65,536. Each is one line: "cuMemMap(ptr=0x.., size=.., offset=0,
 * handle=..) = 0\n". Copies at most capacity - 1 characters and a NUL. Returns the full length. */
size_t ebbtide_sim_log(char* buffer, size_t capacity);
void ebbtide_sim_clear_log(void);

/* Runs everything that is queued on every stream of every device, as a device that catches up would. Items that wait
 * for a number in memory stay queued. */
void ebbtide_sim_run_queued(void);

/* Simulates another process that takes or frees memory: `bytes` of the device's capacity count as used by it. */
void ebbtide_sim_set_foreign_bytes(int device, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
