/* The simulator's control interface, for tests. Plain C, found by dlsym or ctypes in libebbtide_sim.so; never linked by the core.
 *
 * Every function may be called at any time from any thread, also before cuInit. All sizes are bytes. */
#ifndef EBBTIDE_SIM_CONTROL_H
#define EBBTIDE_SIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Back to the state after load: all devices, handles, reservations, streams, events, rules and logs are gone. Live mappings are unmapped. */
void ebbtide_sim_reset(void);

/* Before cuInit (or after a reset): how many devices (default 1, from EBBTIDE_SIM_DEVICES), and how much memory each has
 * (default 1 GiB, from EBBTIDE_SIM_CAPACITY as bytes or "512MiB"). set_capacity also works later: it only bounds what is created from then on. */
void ebbtide_sim_set_device_count(int count);
void ebbtide_sim_set_capacity(int device, uint64_t bytes);

/* Whether `device` reaches memory of `peer`, as cuDeviceCanAccessPeer says (default: every device that of every other). Bounds what is granted from then on. */
void ebbtide_sim_set_peers(int device, int peer, int is_reached);

/* What cuDriverGetVersion says (default 13000). cuGetProcAddress answers CUDA_ERROR_NOT_FOUND for functions that are newer. */
void ebbtide_sim_set_driver_version(int version);

/* Makes cuGetProcAddress and dlsym-by-table act as if this function did not exist. NULL makes all exist again. */
void ebbtide_sim_hide_function(const char* name);

/* Call number k (1 is the next one) of `function` ("cuMemMap"; NULL or "*" counts every call) returns `code` and has no effect. times: how many calls in a row
 * fail from the k-th on (0: all that follow). Several rules may be set; clear_failures drops them all. */
void ebbtide_sim_fail(const char* function, uint64_t k, int code, uint64_t times);
void ebbtide_sim_clear_failures(void);

/* When asynchronous work runs. LATE (default): at the last moment that the driver allows, that is when somebody synchronises with it or
 * polls it (a poll answers CUDA_ERROR_NOT_READY once and runs one item). EAGER: at once. RANDOM: a seeded coin decides for each item. */
enum { EBBTIDE_SIM_LATE = 0, EBBTIDE_SIM_EAGER = 1, EBBTIDE_SIM_RANDOM = 2 };
void ebbtide_sim_set_async(int mode, uint64_t seed);

/* Slows one function down, so that tests can stand in the middle of an operation. 0 is off. "ebbtide_deliver", here and in ebbtide_sim_fail, is each piece
 * of that kernel: its failure becomes the context's sticky error. */
void ebbtide_sim_set_delay(const char* function, uint64_t microseconds);

/* Live objects. device_bytes: physical memory in use on all devices (handles or mappings hold it). pinned_bytes: cuMemHostAlloc. */
typedef struct ebbtide_sim_counts {
  uint64_t reservations, handles, mappings, streams, events, pinned_blocks, registered_ranges, contexts_retained,
      queued_items, modules;
  uint64_t device_bytes, pinned_bytes;
} ebbtide_sim_counts;
void ebbtide_sim_live(ebbtide_sim_counts* counts);

/* How many driver calls have been made since load, reset or the last clear_log: of one function, or of all with NULL. */
uint64_t ebbtide_sim_calls(const char* function);
/* The log of calls, oldest first, "cuMemMap(ptr=0x.., size=.., offset=0, handle=..) = 0\n" a line, the newest 65,536 at most. Copies at most
 * capacity - 1 characters and a NUL; returns the full length. */
size_t ebbtide_sim_log(char* buffer, size_t capacity);
void ebbtide_sim_clear_log(void);

/* Runs everything that is queued on every stream of every device, as a device that catches up would. What waits for a number in memory stays queued. */
void ebbtide_sim_run_queued(void);

/* Another process that takes or gives memory: `bytes` of the device's capacity count as used by somebody else. */
void ebbtide_sim_set_foreign_bytes(int device, uint64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
