/* The policy of libebbtide_preload.so's hooks for a thread's allocations. A part of the C API, version 1; ebbtide.h
 * includes this header and has its conventions. docs/preload.md has the rules. */
#ifndef EBBTIDE_THREADS_H
#define EBBTIDE_THREADS_H
#include "ebbtide.h"
#ifdef __cplusplus
extern "C" {
#endif

typedef enum ebbtide_tagging {
  EBBTIDE_TAGGING_UNSET = 0, /* as the program's policy says */
  EBBTIDE_TAGGING_OFF = 1,   /* the driver's own memory */
  EBBTIDE_TAGGING_ON = 2 /* what torch allocates in this thread, or with EBBTIDE_PAUSEABLE_ALL all of it, is tagged */
} ebbtide_tagging;

typedef struct ebbtide_thread_policy {
  int32_t tagging; /* ebbtide_tagging; default UNSET. tag, backup and retain are kept where it is OFF or UNSET */
  int32_t backup;  /* ebbtide_backup_kind; default RAM */
  bool retain;     /* as in ebbtide_policy */
  uint64_t lease;  /* not 0: once this lease is closed, the policy counts as unset; default 0 */
  char tag[EBBTIDE_TAG_MAX + 1];
} ebbtide_thread_policy;
#define EBBTIDE_THREAD_POLICY_INIT {EBBTIDE_TAGGING_UNSET, EBBTIDE_BACKUP_RAM, false, 0, {0}}

/* The calling thread's policy, which only that thread can change. A new thread has none (UNSET). Without the preload
 * library it is kept and has no effect. set: NULL stands for EBBTIDE_THREAD_POLICY_INIT. */
EBBTIDE_API ebbtide_status ebbtide_set_thread_policy(const ebbtide_thread_policy* policy, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_thread_policy(ebbtide_thread_policy* policy, ebbtide_error* error);

/* The policy of threads that have none: ON in a pauseable program, with its tag and backup, else OFF; UNSET where the
 * preload library is not loaded, or does nothing. It does not change. */
EBBTIDE_API ebbtide_status ebbtide_get_program_policy(ebbtide_thread_policy* policy, ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
