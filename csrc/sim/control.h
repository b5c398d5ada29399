/* The simulator's control interface, for tests. Plain C, found by dlsym or ctypes in libebbtide_sim.so; the core never
 * links it.
 *
 * Every function may be called at any time from any thread, also before cuInit. All sizes are bytes. */
#ifndef EBBTIDE_SIM_CONTROL_H
#define EBBTIDE_SIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Restores the state after load: all devices, handles, reservations, streams, events, rules and logs are gone, and live
 * mappings are unmapped. */
void ebbtide_sim_reset(void);

/* Before cuInit (or after a reset): the number of devices (default 1, from EBBTIDE_SIM_DEVICES), and the memory of each
 * (default 1 GiB, from EBBTIDE_SIM_CAPACITY as bytes or "512MiB"). set_capacity also works later, and then only bounds
 * new memory. */
void ebbtide_sim_set_device_count(int count);
void ebbtide_sim_set_capacity(int device, uint64_t bytes);

/* Whether `device` can access memory of `peer`, as cuDeviceCanAccessPeer answers (default: every device can). Bounds
 * access that is granted later. */
void ebbtide_sim_set_peers(int device, int peer, int is_reached);

/* The answer of cuDriverGetVersion (default 13000). cuGetProcAddress answers CUDA_ERROR_NOT_FOUND for newer functions.
 */
void ebbtide_sim_set_driver_version(int version);

/* Makes cuGetProcAddress and dlsym-by-table act as if this function did not exist. NULL makes all exist again. */
void ebbtide_sim_hide_function(const char* name);

/* Call number k (1 is the next one) of `function` ("cuMemMap"; NULL or "*" counts every call) returns `code` and has no
 * effect. times is the number of consecutive calls that fail from the k-th on (0: all that follow). Several rules may
 * be set; clear_failures drops them all. */
void ebbtide_sim_fail(const char* function, uint64_t k, int code, uint64_t times);
void ebbtide_sim_clear_failures(void);

/* When asynchronous work runs. LATE (default): at the last moment that the driver allows, which is a synchronisation or
 * a poll (a poll answers CUDA_ERROR_NOT_READY once and runs one item). EAGER: at once. RANDOM: a seeded coin decides
 * for each item. */
enum { EBBTIDE_SIM_LATE = 0, EBBTIDE_SIM_EAGER = 1, EBBTIDE_SIM_RANDOM = 2 };
void ebbtide_sim_set_async(int mode, uint64_t seed);

/* Delays one function, so that tests can act in the middle of an operation. 0 turns it off. The name "ebbtide_deliver",
 * here and in ebbtide_sim_fail, means each piece of that kernel: its failure becomes the context's sticky error. */
void ebbtide_sim_set_delay(const char* function, uint64_t microseconds);

/* The numbers of live objects. device_bytes: physical memory of all devices that handles or mappings hold.
 * pinned_bytes: cuMemHostAlloc. */
typedef struct ebbtide_sim_counts {
  uint64_t reservations, handles, mappings, streams, events, pinned_blocks, registered_ranges, contexts_retained,
      queued_items, modules;
  uint64_t device_bytes, pinned_bytes;
} ebbtide_sim_counts;
void ebbtide_sim_live(ebbtide_sim_counts* counts);

/* The number of driver calls since load, reset or the last clear_log: of one function, or of all with NULL. */
uint64_t ebbtide_sim_calls(const char* function);
/* The log of calls, oldest first, a line "cuMemMap(ptr=0x.., size=.., offset=0, handle=..) = 0\n" each, at most the
 * newest 65,536. Copies at most capacity - 1 characters and a NUL; returns the full length. */
size_t ebbtide_sim_log(char* buffer, size_t capacity);
void ebbtide_sim_clear_log(void);

/* Runs everything that is queued on every stream of every device, as a device that catches up would. Items that wait
 * for a number in memory stay queued. */
void ebbtide_sim_run_queued(void);

/* Another process that takes or gives memory: `bytes` of the device's capacity count as used by somebody else. */
void ebbtide_sim_set_foreign_bytes(int device, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
