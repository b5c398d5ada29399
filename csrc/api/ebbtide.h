/* ebbtide: GPU memory that leaves and comes back. The C API, version 1.
 *
 * This header includes ebbtide_ahead.h (copies ahead of a pause), ebbtide_causes.h (causes of refusals),
 * ebbtide_queries.h (allocations, tags, statistics and events), ebbtide_lms.h (large model support), ebbtide_share.h
 * (memory of several processes) and ebbtide_threads.h (policies of threads). ebbtide_settings.h, which sets and shows
 * limits and options by name, is separate.
 *
 *   ebbtide_error error = EBBTIDE_ERROR_INIT;
 *   void *weights = NULL;
 *   if (ebbtide_alloc("weights", NULL, 0, bytes, &weights, &error) != EBBTIDE_OK) {
 *     fprintf(stderr, "%s\n", error.message);
 *     ...
 *   }
 *   ebbtide_pause(EBBTIDE_TAG("weights"), NULL, &error);    // copies the bytes to RAM and frees the device memory
 *   ebbtide_resume(EBBTIDE_TAG("weights"), NULL, &error);   // brings them back to the same address
 *   ebbtide_free(weights, &error);
 *
 * Conventions
 * - Every function that can fail returns ebbtide_status and fills *error unless error is NULL. Outputs are written on
 *   success only.
 * - Initialise structs that you pass in with their _INIT macro, where there is one. Structs may grow in another
 * version, so compile a program with the headers of the library that it runs with: ebbtide_api_version() is
 * EBBTIDE_API_VERSION.
 * - Any function may be called from any thread. None takes the Python GIL, throws a C++ exception or ends the process.
 * - Allocation and free (ebbtide_alloc, ebbtide_free, the slot functions) never wait for an operation. Operations on
 *   the same tags wait for one another.
 * - Strings passed in are UTF-8. A tag has 1 to EBBTIDE_TAG_MAX bytes; '*', '/', invisible characters, and leading and
 *   trailing spaces are refused. Strings passed out live as long as the visit or the object that they belong to.
 * - Sizes are bytes, devices are CUDA ordinals, and durations are seconds.
 */
#ifndef EBBTIDE_H
#define EBBTIDE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define EBBTIDE_API __attribute__((visibility("default")))

#define EBBTIDE_API_VERSION 1
#define EBBTIDE_TAG_MAX 255
#define EBBTIDE_UNLIMITED UINT64_MAX

/* --- status and errors -------------------------------------------------------------------------------------------- */
typedef enum ebbtide_status {
  EBBTIDE_OK = 0,
  EBBTIDE_INVALID_ARGUMENT = 1, /* null, an absurd size, a malformed tag, or an address that ebbtide does not own */
  EBBTIDE_OUT_OF_MEMORY = 2,    /* the device has too little memory, or device_limit does not allow it */
  EBBTIDE_STATE_ERROR = 3,      /* an unknown or leased tag, a capture under way, use after fork, ... */
  EBBTIDE_DRIVER_ERROR = 4,     /* a driver call failed; call, code and arguments describe it */
  EBBTIDE_STORE_ERROR = 5,      /* the host has too little memory for the backup, or the disk failed */
  EBBTIDE_INTERNAL_ERROR = 6    /* a bug in ebbtide: please report it */
} ebbtide_status;

typedef struct ebbtide_error {
  ebbtide_status status;
  int32_t device;                       /* OUT_OF_MEMORY: the device; else -1 */
  uint64_t requested_bytes, free_bytes; /* OUT_OF_MEMORY, STORE_ERROR */
  uint64_t limit_bytes;                 /* EBBTIDE_UNLIMITED where no limit is set */
  int32_t code;                         /* DRIVER_ERROR: the CUresult */
  char call[64];                        /* DRIVER_ERROR: "cuMemMap" */
  char arguments[256];                  /* DRIVER_ERROR: "ptr=0x7f.., size=2097152, ..." */
  char message[1024];                   /* some sentences, with advice */
  int32_t cause;                        /* ebbtide_cause, of ebbtide_causes.h */
} ebbtide_error;
#define EBBTIDE_ERROR_INIT {EBBTIDE_OK, -1, 0, 0, EBBTIDE_UNLIMITED, 0, {0}, {0}, {0}, 0}

/* --- the library and its driver ----------------------------------------------------------------------------------- */
EBBTIDE_API uint32_t ebbtide_api_version(void);
EBBTIDE_API const char* ebbtide_version(void); /* "0.1.0" */
/* Digits that change with these headers and the list of settings. Python's module refuses a library with others. */
EBBTIDE_API const char* ebbtide_build(void);
EBBTIDE_API const char* ebbtide_library_path(void); /* the file that this code was loaded from */

/* Chooses the driver for this process: "cuda" (libcuda.so.1), "hip" (libamdhip64.so), "sim" (libebbtide_sim.so beside
 * this library), or NULL for the choice of EBBTIDE_DRIVER ("auto" and unset mean "cuda"). Loads nothing yet. The first
 * use of a device fixes the choice, and makes it if this was not called; a different choice after that is a
 * STATE_ERROR. */
EBBTIDE_API ebbtide_status ebbtide_use_driver(const char* name, ebbtide_error* error);
EBBTIDE_API const char* ebbtide_driver_name(void); /* "cuda", "hip" or "sim"; "" before the choice is made */
/* Whether the devices are simulated: "sim" is chosen, or libcuda.so.1 is the simulated driver itself. Loads that
 * library where no choice is made yet, and starts nothing. */
EBBTIDE_API bool ebbtide_is_simulated(void);

typedef struct ebbtide_device_info {
  int32_t device;
  int32_t compute_capability; /* 90 for 9.0; 0 on the simulator */
  char name[128];
  uint8_t uuid[16]; /* of the GPU, or of its part that this process sees: the same in all processes */
  uint64_t total_bytes, free_bytes, granularity_bytes;
  uint64_t held_bytes, limit_bytes; /* device memory that ebbtide holds there; device_limit, or EBBTIDE_UNLIMITED */
  uint64_t room_bytes;              /* new memory beyond this spills; allocations of up to 2 MiB may get more */
  uint64_t peak_bytes;              /* the most that was held since the start, or since ebbtide_reset_peaks */
} ebbtide_device_info;
EBBTIDE_API ebbtide_status ebbtide_device_count(int32_t* count, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_query_device(int32_t device, ebbtide_device_info* info, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_driver_version(int32_t* version, ebbtide_error* error); /* 13000 for CUDA 13.0 */

/* Visits every capability: its name ("vmm", "rdma", "host_memory", ...), whether it is available, the probe's finding,
 * and advice ("" if there is nothing to do). */
typedef void (*ebbtide_visit_capability)(void* user, const char* name, bool is_available, const char* found,
                                         const char* advice);
EBBTIDE_API ebbtide_status ebbtide_visit_capabilities(int32_t device, ebbtide_visit_capability visit, void* user,
                                                      ebbtide_error* error);

/* --- allocations -------------------------------------------------------------------------------------------------- */
typedef enum ebbtide_backup_kind {
  EBBTIDE_BACKUP_AS_ALLOCATED = -1, /* operations only: the kind in each allocation's policy */
  EBBTIDE_BACKUP_NONE = 0,          /* a pause drops the content */
  EBBTIDE_BACKUP_RAM = 1,
  EBBTIDE_BACKUP_PINNED = 2, /* the fastest; stays pinned until the allocation is freed, or resumed with retain 0 */
  EBBTIDE_BACKUP_DISK = 3
} ebbtide_backup_kind;

/* The answer to an allocation for which the device has too little memory. NONE: OUT_OF_MEMORY. The others use host
 * memory behind the same contiguous address, which the device reaches over the bus. SPLIT: the front fills the device
 * down to the reserve, and the rest goes to the host. WHOLE: an allocation larger than 0.6 of the free memory goes to
 * the host completely, and a smaller one to the device. With HIP they are a STATE_ERROR. */
enum ebbtide_overflow { EBBTIDE_OVERFLOW_NONE, EBBTIDE_OVERFLOW_SPLIT, EBBTIDE_OVERFLOW_WHOLE };
typedef struct ebbtide_policy {
  int32_t backup;   /* ebbtide_backup_kind; default RAM */
  int32_t overflow; /* ebbtide_overflow; default NONE */
  bool retain;      /* a resume keeps the backup's memory and content for the next pause; default false */
  /* The caller has caches. Its first request is refused instead of spilled; it then frees its caches and asks again, at
   * once, in the same thread and for the same size, and that request may spill. Default false. */
  bool flushes_first;
  bool exportable; /* ebbtide_export may give it to other processes; not with overflow; default false */
} ebbtide_policy;
#define EBBTIDE_POLICY_INIT {EBBTIDE_BACKUP_RAM, EBBTIDE_OVERFLOW_NONE, false, false, false}

/* A new allocation: resident, zeroed, its size rounded up to the device's granularity. policy NULL: the defaults. */
EBBTIDE_API ebbtide_status ebbtide_alloc(const char* tag, const ebbtide_policy* policy, int32_t device,
                                         uint64_t size_bytes, void** address, ebbtide_error* error);
/* address: a result of ebbtide_alloc, or NULL (does nothing). Waits for the device, as cudaFree does, but never for
 * an operation: an operation that holds the memory frees it when it ends. During a capture the free is deferred. */
EBBTIDE_API ebbtide_status ebbtide_free(void* address, ebbtide_error* error);
/* Fills the host pool up to the setting host_pool, with memory near this device. STORE_ERROR if the host has too
 * little; the part already made stays, and is given up when backups or spills need the room. */
EBBTIDE_API ebbtide_status ebbtide_fill_host_pool(int32_t device, ebbtide_error* error);

/* --- slots: how a torch pool finds its region --------------------------------------------------------------------- */
/* The slot of (tag, policy, device). The same combination always has the same slot. Makes the tag known. STATE_ERROR
 * when all EBBTIDE_SLOT_COUNT are taken. */
#define EBBTIDE_SLOT_COUNT 4096
EBBTIDE_API ebbtide_status ebbtide_bind_slot(const char* tag, const ebbtide_policy* policy, int32_t device,
                                             int32_t* slot, ebbtide_error* error);
/* NULL when out of memory (after ebbtide has freed its own caches) or on any other failure, which is logged. stream is
 * used to detect captures only, and may be NULL. */
EBBTIDE_API void* ebbtide_slot_alloc(int32_t slot, uint64_t size_bytes, void* stream);
/* The same, for callers that want the error. It is filled on failure only. */
EBBTIDE_API void* ebbtide_slot_alloc_or_error(int32_t slot, uint64_t size_bytes, void* stream, ebbtide_error* error);
/* ebbtide_free for callers that can't take an error: failures are logged. In a forked child it does nothing. */
EBBTIDE_API void ebbtide_slot_free(void* address);
/* The two functions of this slot for torch.cuda.memory.CUDAPluggableAllocator: void *malloc(ssize_t, int, void *) and
 * void free(void *, ssize_t, int, void *). */
EBBTIDE_API ebbtide_status ebbtide_torch_functions(int32_t slot, void** malloc_function, void** free_function,
                                                   ebbtide_error* error);

/* --- leases ------------------------------------------------------------------------------------------------------- */
/* While a lease on a tag is open, pausing the tag is a STATE_ERROR that names holder. epoch counts the pauses of the
 * tag. is_away says whether any of its memory is away now. A pool may be used if !is_away, or if it was made in this
 * epoch. */
typedef struct ebbtide_lease {
  uint64_t id, epoch;
  bool is_away;
} ebbtide_lease;
EBBTIDE_API ebbtide_status ebbtide_open_lease(const char* tag, const char* holder, ebbtide_lease* lease,
                                              ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_close_lease(uint64_t id, ebbtide_error* error);
/* The number of the newest lease on any tag, for a request's unused_as_of. */
EBBTIDE_API uint64_t ebbtide_last_lease(void);

/* --- captures ----------------------------------------------------------------------------------------------------- */
/* Call these around a stream capture in any thread. begin waits for the running operation. While a capture is open, an
 * operation is a STATE_ERROR and frees are deferred. A thread that holds a claim must not call begin: it would wait for
 * itself. */
EBBTIDE_API ebbtide_status ebbtide_begin_capture(ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_end_capture(ebbtide_error* error);

/* --- operations --------------------------------------------------------------------------------------------------- */
typedef enum ebbtide_operation_kind {
  EBBTIDE_PAUSE = 0,
  EBBTIDE_RESUME = 1,
  EBBTIDE_PREPARE = 3,
  EBBTIDE_TRIM = 4,
  EBBTIDE_PROMOTE = 6,
  EBBTIDE_DEMOTE = 7
} ebbtide_operation_kind;

typedef struct ebbtide_range {
  uint64_t address, size_bytes;
} ebbtide_range;

typedef struct ebbtide_paused_set
    ebbtide_paused_set; /* the allocations that a pause took memory from: ebbtide_make_paused_set */
typedef struct ebbtide_request {
  const char* const* tags; /* tag_count names; duplicates are ignored */
  size_t tag_count;        /* 0: every tag */
  bool missing_ok;         /* skips unknown tags; else an unknown tag is a STATE_ERROR that lists the known ones */
  bool keeps_host; /* promote: keeps the host memory that the bytes come from, as long as nothing else needs it, so that
                      a later demote copies only changed blocks. It counts on host_limit. */
  int32_t backup;  /* pause: the ebbtide_backup_kind of this pause; default AS_ALLOCATED */
  int32_t retain;  /* resume: 1 or 0 overrides each allocation's policy; default -1: the policies apply */
  /* Restricts the tags to address_count allocations, given by their first addresses. A resume may have put several
   * allocations of a tag behind one handle. If only some of them leave, these first get a handle of their own at the
   * same address, and nothing may use the others meanwhile. If the device has no room for that, a pause or swap is a
   * STATE_ERROR. The setting shared_handle 0 turns sharing off. */
  const void* const* addresses;
  size_t address_count; /* 0: all of them, except trimmed ones */
  /* pause, resume: unused_count address ranges whose content is not in use, may be dropped and need not come back. True
   * as of the moment when lease unused_as_of was the newest; ignored for a tag that was leased later. */
  const ebbtide_range* unused;
  size_t unused_count;
  uint64_t unused_as_of;
  const ebbtide_range* order; /* resume: order_count ranges whose bytes come first, in this order */
  size_t order_count;
  /* pause: receives the allocations that moved, also if the pause fails midway. resume: only these are resumed; those
   * freed or trimmed since are skipped. Default NULL. */
  ebbtide_paused_set* paused_set;
  /* demote: at most this much device memory leaves. promote: at most this much is taken on each device. Default
   * UINT64_MAX. */
  uint64_t max_bytes;
  /* pause: the ebbtide_backup_kind of each of tags, tag_count of them, instead of `backup`, which stands for those that
   * say AS_ALLOCATED. A tag that is listed twice says the same twice. All tags leave in one operation. Default NULL. */
  const int32_t* backups;
  /* pause, swap, demote: called in the calling thread once everything is ready to move, with the tags held, so that
   * other processes let go of memory that ebbtide_export has lent. false: nothing moves, a STATE_ERROR. Default NULL:
   * lent memory does not move. */
  bool (*before_moving)(void* user);
  void* before_moving_user;
} ebbtide_request;
#define EBBTIDE_REQUEST_INIT                                                                            \
  {NULL,       0,    false, false, EBBTIDE_BACKUP_AS_ALLOCATED, -1, NULL, 0, NULL, 0, 0, NULL, 0, NULL, \
   UINT64_MAX, NULL, NULL,  NULL}
/* A request for one tag, in C. */
#ifndef __cplusplus
#define EBBTIDE_TAG(name)                                    \
  (&(ebbtide_request){.tags = (const char* const[]){name},   \
                      .tag_count = 1,                        \
                      .max_bytes = UINT64_MAX,               \
                      .backup = EBBTIDE_BACKUP_AS_ALLOCATED, \
                      .retain = -1})
#endif

typedef struct ebbtide_report ebbtide_report; /* free it with ebbtide_free_report */
typedef struct ebbtide_report_row {
  const char* tag; /* lives as long as the report */
  int32_t device;
  /* device bytes freed (pause, trim, demote) or claimed (resume, promote); host bytes prepared (prepare) */
  uint64_t bytes;
  uint64_t copied;   /* bytes that crossed the bus */
  uint64_t skipped;  /* bytes with a backup that needed no copy: clean + unused + constant */
  uint64_t clean;    /* the backup held them already */
  uint64_t unused;   /* not in use */
  uint64_t constant; /* one repeated value */
} ebbtide_report_row;
typedef struct ebbtide_report_totals {
  int32_t kind; /* ebbtide_operation_kind */
  double seconds;
  const char* note;       /* why a promotion stopped before all was on the device, or ""; lives as long as the report */
  ebbtide_report_row sum; /* of all rows; its tag is "" and its device -1 */
} ebbtide_report_totals;
typedef void (*ebbtide_visit_row)(void* user, const ebbtide_report_row* row);
EBBTIDE_API ebbtide_status ebbtide_read_report(const ebbtide_report* report, ebbtide_report_totals* totals,
                                               ebbtide_error* error);
/* Visits a row for each (tag, device) that moved. */
EBBTIDE_API ebbtide_status ebbtide_visit_report(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                                ebbtide_error* error);
/* Visits the device memory that ebbtide still holds after the operation: bytes by (tag, device). */
EBBTIDE_API ebbtide_status ebbtide_visit_remaining(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                                   ebbtide_error* error);
EBBTIDE_API void ebbtide_free_report(ebbtide_report* report);

/* A request's paused_set, to resume exactly what one pause moved. Pause with a new one. Resume with the same one, and
 * with the tags that ebbtide_visit_paused_set visits (if the request names no tags, the resume holds every tag). */
EBBTIDE_API ebbtide_status ebbtide_make_paused_set(ebbtide_paused_set** set, ebbtide_error* error);
typedef void (*ebbtide_visit_name)(void* user, const char* tag);
EBBTIDE_API ebbtide_status ebbtide_visit_paused_set(const ebbtide_paused_set* set, ebbtide_visit_name visit, void* user,
                                                    ebbtide_error* error);
EBBTIDE_API void ebbtide_free_paused_set(ebbtide_paused_set* set);
/* The number of pauses that moved memory of the tag, which tells whether it was paused again; 0 for an unknown tag. */
EBBTIDE_API ebbtide_status ebbtide_pause_count(const char* tag, uint64_t* count, ebbtide_error* error);

/* Claim and commit in one call. report may be NULL. An empty selection gives an empty report. A failure before the
 * first byte is given up leaves everything as it was. After a later one the tag is partial, and repeating the call
 * finishes it. */
EBBTIDE_API ebbtide_status ebbtide_pause(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_resume(const ebbtide_request* request, ebbtide_report** report,
                                          ebbtide_error* error);

/* Pauses the tags of leaving and resumes those of returning at the same time. Neither may be empty, and no tag may be
 * in both. Device memory stays within the larger of the two plus 256 MiB (or plus the largest chunk that comes back);
 * host memory stays within the need of both. OUT_OF_MEMORY and STORE_ERROR before anything moves leave both as they
 * were. After a later failure, a pause and a resume finish them. */
EBBTIDE_API ebbtide_status ebbtide_swap(const ebbtide_request* leaving, const ebbtide_request* returning,
                                        ebbtide_report** pause_report, ebbtide_report** resume_report,
                                        ebbtide_error* error);

/* Takes the memory of backups (pages, pins, file space) now, so that the next pause of the tags need not wait for it.
 * Allocations that have a backup are skipped. */
EBBTIDE_API ebbtide_status ebbtide_prepare(const ebbtide_request* request, ebbtide_report** report,
                                           ebbtide_error* error);

/* Frees the memory of the allocations at request->addresses, which must not be in use, and drops their content. Their
 * tags do not become paused. ebbtide_resume with the same addresses brings them back, zeroed; a resume without
 * addresses does not. If they are away, their backups are freed, except those that are being viewed
 * (ebbtide_backup_of). STATE_ERROR while a lease on their tag is open, unless all of them are away. Those that share a
 * handle with others first get one of their own at the same address; nothing may use the others meanwhile. A
 * DRIVER_ERROR may leave some of those away until ebbtide_resume or ebbtide_pause. */
EBBTIDE_API ebbtide_status ebbtide_trim(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error);

/* Moves spilled memory from the host to the device, oldest first, while there is room beyond the reserve, and until
 * request->max_bytes have come. Addresses and bytes stay the same. Nothing may use the tags meanwhile. STATE_ERROR
 * while a lease on one of them is open. */
EBBTIDE_API ebbtide_status ebbtide_promote(const ebbtide_request* request, ebbtide_report** report,
                                           ebbtide_error* error);

/* Moves memory from the device to host memory that the device reads and writes at the same addresses, over the bus: in
 * the order of addresses, until request->max_bytes have gone. Allocations of every policy move; those that are paused
 * or on the host are skipped. Memory moves by driver handles; one that is larger than the rest of max_bytes stays.
 * Nothing may use the tags meanwhile. STATE_ERROR while a lease on one of them is open. STORE_ERROR, with nothing
 * moved, where the host has too little memory for all of it. ebbtide_promote is the way back; memory that one with
 * keeps_host brought, and has not changed since, is not copied. */
EBBTIDE_API ebbtide_status ebbtide_demote(const ebbtide_request* request, ebbtide_report** report,
                                          ebbtide_error* error);

/* A resume that returns once everything is mapped; kernels may use the bytes that have arrived. The tags are held until
 * all bytes have arrived: a pause waits for that. */
typedef struct ebbtide_pending ebbtide_pending;
EBBTIDE_API ebbtide_status ebbtide_resume_async(const ebbtide_request* request, ebbtide_pending** pending,
                                                ebbtide_error* error);
/* Makes a stream of this device (a CUstream) wait for the bytes of range_count ranges; 0: for all bytes. Ranges that
 * are not on their way count as arrived. The stream also continues if the resume fails. */
EBBTIDE_API ebbtide_status ebbtide_pending_stream_wait(ebbtide_pending* pending, int32_t device, void* stream,
                                                       const ebbtide_range* ranges, size_t range_count,
                                                       ebbtide_error* error);
/* Whether the bytes of the range have arrived, or the resume has ended. range NULL: whether it has ended. */
EBBTIDE_API ebbtide_status ebbtide_pending_ready(ebbtide_pending* pending, const ebbtide_range* range, bool* ready,
                                                 ebbtide_error* error);
/* Waits for the end, and returns the resume's error or report. May be called repeatedly. report may be NULL. */
EBBTIDE_API ebbtide_status ebbtide_pending_wait(ebbtide_pending* pending, ebbtide_report** report,
                                                ebbtide_error* error);
/* Frees the handle. The resume goes on, and the end of the process waits for it. */
EBBTIDE_API void ebbtide_free_pending(ebbtide_pending* pending);

/* The tags that an operation of this kind would move now, for callers that must prepare for it. Waits until no other
 * operation holds the tags, refuses unknown and leased tags and captures as the operation would, and visits the tags
 * whose content would move. Nothing is held afterwards, so the operation itself may still be refused; too little memory
 * shows only there. A trim without addresses stands for all allocations. */
EBBTIDE_API ebbtide_status ebbtide_preview(ebbtide_operation_kind kind, const ebbtide_request* request,
                                           ebbtide_visit_name visit, void* user, ebbtide_error* error);
/* Waits until no operation holds any of the request's tags. Whether an operation failed is told by its own call. */
EBBTIDE_API ebbtide_status ebbtide_wait_for_tags(const ebbtide_request* request, ebbtide_error* error);

/* The two phases of an operation, for ranks that decide together. A claim holds its tags (other operations on them
 * wait), its budgets and its physical memory until it is committed or abandoned. Both consume the operation, even if
 * they fail.
 */
typedef struct ebbtide_operation ebbtide_operation;
EBBTIDE_API ebbtide_status ebbtide_claim(ebbtide_operation_kind kind, const ebbtide_request* request,
                                         ebbtide_operation** operation, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_commit(ebbtide_operation* operation, ebbtide_report** report, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_abandon(ebbtide_operation* operation, ebbtide_error* error);

/* The stored bytes of [address, address + size), which must lie in one allocation. *bytes is NULL if any of the range
 * is resident or dropped. The bytes stay readable until ebbtide_release_backup, also after a resume. They may be
 * written before the resume, except during an operation on the tag: the resume then brings back the new bytes. The next
 * pause copies these blocks whether they changed or not. A resume does not retain a backup that is being viewed. Waits
 * for an operation on the tag. */
typedef struct ebbtide_backup ebbtide_backup;
EBBTIDE_API ebbtide_status ebbtide_backup_of(const void* address, uint64_t size_bytes, void** bytes,
                                             ebbtide_backup** backup, ebbtide_error* error);
/* The same, and also of a range that is on the device as a whole, if a resume retained its backup (retain 1, or a
 * pinned one): its bytes as they were when it was paused last, at the address that they had then. A resume retains a
 * backup that is viewed this way, if it would have otherwise, and the next pause refreshes the bytes at the same
 * address; while it runs they are of no use. That pause makes another backup, and *bytes keeps showing the old one, if
 * it is told another kind or if ebbtide_backup_of views the backup as well. After ebbtide_release_backup *bytes can be
 * read until the backup is given back (a resume that does not retain, ebbtide_free), but a pause no longer writes
 * blocks of one value there: ask again. */
EBBTIDE_API ebbtide_status ebbtide_retained_backup_of(const void* address, uint64_t size_bytes, void** bytes,
                                                      ebbtide_backup** backup, ebbtide_error* error);
EBBTIDE_API void ebbtide_release_backup(ebbtide_backup* backup);

#ifdef __cplusplus
}
#endif
#include "ebbtide_ahead.h"
#include "ebbtide_causes.h"
#include "ebbtide_lms.h"
#include "ebbtide_queries.h"
#include "ebbtide_share.h"
#include "ebbtide_threads.h"
#endif
