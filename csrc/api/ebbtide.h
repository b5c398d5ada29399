/* ebbtide: GPU memory that leaves and comes back. The C API, version 1.
 *
 * The one wall between ebbtide's core and everything else (Python, torch, C programs). Only C crosses it: no exception, no C++ object.
 *
 *   ebbtide_error error = EBBTIDE_ERROR_INIT;
 *   void *weights = NULL;
 *   if (ebbtide_alloc("weights", NULL, 0, bytes, &weights, &error) != EBBTIDE_OK) { fprintf(stderr, "%s\n", error.message); ... }
 *   ebbtide_pause(EBBTIDE_TAG("weights"), NULL, &error);    // the bytes go to RAM, the device memory is free for others
 *   ebbtide_resume(EBBTIDE_TAG("weights"), NULL, &error);   // the same address, the same bytes
 *   ebbtide_free(weights, &error);
 *
 * Conventions
 * - Every function that can fail returns ebbtide_status and fills *error when error is not NULL. Outputs are written on success only.
 * - Structs that may grow begin with struct_size; initialise them with their _INIT macro. Unknown (larger) sizes are accepted, too small ones refused.
 * - Any function may be called from any thread. None takes the Python GIL. None ends the process. malloc and free (ebbtide_alloc, ebbtide_free, the slot functions) never wait for an operation; pause and resume wait for another operation on the same tags.
 * - Strings handed in are UTF-8, 1 to EBBTIDE_TAG_MAX bytes for a tag, without '*', '/', characters that can't be seen, and spaces at its ends. Strings handed out live as long as the visit or the object.
 * - Sizes are bytes. Devices are CUDA ordinals. Seconds are doubles.
 */
#ifndef EBBTIDE_H
#define EBBTIDE_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define EBBTIDE_API __attribute__((visibility("default")))

#define EBBTIDE_API_VERSION 1
#define EBBTIDE_TAG_MAX 255
#define EBBTIDE_UNLIMITED UINT64_MAX

/* --- status and errors ------------------------------------------------------------------------------------------------ */
typedef enum ebbtide_status {
  EBBTIDE_OK = 0,
  EBBTIDE_INVALID_ARGUMENT = 1, /* null, an absurd size, a malformed tag, a pointer that is not ours */
  EBBTIDE_OUT_OF_MEMORY = 2,    /* the device has too little, or device_limit does not allow it */
  EBBTIDE_STATE_ERROR = 3,      /* unknown tag, leased tag, capture under way, use after fork, ... */
  EBBTIDE_DRIVER_ERROR = 4,     /* a driver call failed: call, code and arguments say which */
  EBBTIDE_STORE_ERROR = 5,      /* the host has too little for the backup, or the disk failed */
  EBBTIDE_INTERNAL_ERROR = 6    /* a bug in ebbtide: please report it */
} ebbtide_status;

typedef struct ebbtide_error {
  size_t struct_size;
  ebbtide_status status;
  int32_t device;                       /* OUT_OF_MEMORY: which; else -1 */
  uint64_t requested_bytes, free_bytes; /* OUT_OF_MEMORY, STORE_ERROR */
  uint64_t limit_bytes;                 /* EBBTIDE_UNLIMITED where no limit is set */
  int32_t code;                         /* DRIVER_ERROR: the CUresult */
  char call[64];                        /* DRIVER_ERROR: "cuMemMap" */
  char arguments[256];                  /* DRIVER_ERROR: "ptr=0x7f.., size=2097152, ..." */
  char message[1024];                   /* one sentence or two; says what to do */
} ebbtide_error;
#define EBBTIDE_ERROR_INIT {sizeof(ebbtide_error), EBBTIDE_OK, -1, 0, 0, EBBTIDE_UNLIMITED, 0, {0}, {0}, {0}}

/* --- the library and its driver --------------------------------------------------------------------------------------- */
EBBTIDE_API uint32_t ebbtide_api_version(void);
EBBTIDE_API const char* ebbtide_version(void);      /* "0.1.0" */
EBBTIDE_API const char* ebbtide_library_path(void); /* the file that this very code was loaded from */

/* Chooses the driver for this process: "cuda" (libcuda.so.1), "sim" (libebbtide_sim.so beside this library), or NULL for what EBBTIDE_DRIVER says ("auto" and unset mean "cuda"). Loads nothing yet. The first use of the device fixes the choice; another choice after that is a STATE_ERROR. Functions that need a driver choose by themselves when nobody has. */
EBBTIDE_API ebbtide_status ebbtide_use_driver(const char* name, ebbtide_error* error);
EBBTIDE_API const char* ebbtide_driver_name(void); /* "cuda" or "sim"; "" while none is chosen */

typedef struct ebbtide_device_info {
  size_t struct_size;
  int32_t device;
  int32_t compute_capability; /* 90 for 9.0; 0 on the simulator */
  char name[128];
  uint64_t total_bytes, free_bytes, granularity_bytes;
  uint64_t held_bytes, limit_bytes; /* device memory that ebbtide holds there; device_limit, or EBBTIDE_UNLIMITED */
  uint64_t room_bytes;              /* what new memory gets before it spills; up to 2 MiB may get more */
} ebbtide_device_info;
#define EBBTIDE_DEVICE_INFO_INIT {sizeof(ebbtide_device_info), -1, 0, {0}, 0, 0, 0, 0, 0, 0}
EBBTIDE_API ebbtide_status ebbtide_device_count(int32_t* count, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_query_device(int32_t device, ebbtide_device_info* info, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_driver_version(int32_t* version, ebbtide_error* error); /* 13000 for CUDA 13.0 */

/* Every capability probe, one visit each: name ("vmm", "rdma", "host_memory", ...), available (0 or 1), what it said, what to do about it ("" if nothing). */
typedef void (*ebbtide_visit_capability)(void* user, const char* name, int available, const char* found,
                                         const char* advice);
EBBTIDE_API ebbtide_status ebbtide_visit_capabilities(int32_t device, ebbtide_visit_capability visit, void* user,
                                                      ebbtide_error* error);

/* --- limits ----------------------------------------------------------------------------------------------------------- */
/* Bytes. EBBTIDE_UNLIMITED where nothing else is said; RAM and cgroups bound host memory in any case. */
typedef enum ebbtide_limit {
  EBBTIDE_DEVICE_LIMIT = 0, /* that ebbtide may hold on each device */
  EBBTIDE_HOST_LIMIT = 1,   /* of host memory that it may hold */
  EBBTIDE_HOST_MARGIN = 2,  /* that it leaves to others; default 1 GiB or a sixteenth of RAM, the smaller */
  EBBTIDE_PINNED_LIMIT = 3, /* of pinned memory: rings between device and host, and pinned backups */
  EBBTIDE_RESERVE = 4,      /* of a device that spills leave free; UNLIMITED: 512 MiB or a sixteenth, the smaller */
  EBBTIDE_HOST_POOL = 5,    /* of host memory that is kept for the next spill, at most RAM; default 0 */
  EBBTIDE_SHARED_HANDLE = 6 /* that neighbours of a tag share when they come back; default 1 GiB; 0: none share */
} ebbtide_limit;
EBBTIDE_API ebbtide_status ebbtide_set_limit(ebbtide_limit limit, uint64_t bytes, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_limit(ebbtide_limit limit, uint64_t* bytes, ebbtide_error* error);

/* For EBBTIDE_OVERFLOW_WHOLE: a share, 0 to 1, of what is free on the device beyond the reserve; default 0.6. */
EBBTIDE_API ebbtide_status ebbtide_set_whole_fraction(double fraction, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_whole_fraction(double* fraction, ebbtide_error* error);
/* Makes what EBBTIDE_HOST_POOL allows and is not there yet, near this device. STORE_ERROR where the host has too little; what was made stays, and gives way to backups and spills that have no room beside it. */
EBBTIDE_API ebbtide_status ebbtide_fill_host_pool(int32_t device, ebbtide_error* error);

/* What a pause may leave where it is; 1 (default) or 0. SKIP_CLEAN: blocks of 2 MiB that did not change since their backup was made, by a 128-bit digest (two different contents have the same one with odds of
 * 2^-128). SKIP_UNUSED: ranges of which the request says that nobody uses them. SKIP_CONSTANT: blocks of one repeated value of 16 bytes. COMPARE_BYTES (default 0): where the digest says that nothing changed, the bytes are copied and compared all the same; pinned backups are simply written again. */
typedef enum ebbtide_option {
  EBBTIDE_SKIP_CLEAN = 0,
  EBBTIDE_SKIP_UNUSED = 1,
  EBBTIDE_SKIP_CONSTANT = 2,
  EBBTIDE_COMPARE_BYTES = 3
} ebbtide_option;
EBBTIDE_API ebbtide_status ebbtide_set_option(ebbtide_option option, int32_t value, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_option(ebbtide_option option, int32_t* value, ebbtide_error* error);

/* The folder of disk backups that are made from now on; NULL: EBBTIDE_DISK_DIRECTORY, else TMPDIR, else /var/tmp. STORE_ERROR, and nothing is set, where no backup could be made in it. ebbtide_settings.h sets all of these by name. */
EBBTIDE_API ebbtide_status ebbtide_set_disk_directory(const char* path, ebbtide_error* error);

/* --- allocations ------------------------------------------------------------------------------------------------------ */
typedef enum ebbtide_backup_kind {
  EBBTIDE_BACKUP_AS_ALLOCATED = -1, /* operations only: what each allocation's policy says */
  EBBTIDE_BACKUP_NONE = 0,          /* content is dropped at pause */
  EBBTIDE_BACKUP_RAM = 1,
  EBBTIDE_BACKUP_PINNED = 2, /* the fastest; stays pinned until the allocation is freed, or resumed with retain 0 */
  EBBTIDE_BACKUP_DISK = 3
} ebbtide_backup_kind;

/* What becomes of an allocation for which the device has too little: out of memory; or it lies on the host, where the device reaches it over the bus behind the same contiguous address. SPLIT: but for its front, which fills the device down to EBBTIDE_RESERVE. WHOLE: all of it, if it is larger than the whole fraction of what is free. */
enum ebbtide_overflow { EBBTIDE_OVERFLOW_NONE, EBBTIDE_OVERFLOW_SPLIT, EBBTIDE_OVERFLOW_WHOLE };
typedef struct ebbtide_policy {
  size_t struct_size;
  int32_t backup;   /* ebbtide_backup_kind; default RAM */
  int32_t retain;   /* 1: a resume keeps the backup's memory and content for the next pause; default 0 */
  int32_t overflow; /* ebbtide_overflow; default NONE */
  int32_t
      flushes_first; /* 1: the caller gives its caches back when it is refused, and asks again at once in the same thread for the same size: the first call is refused, the second spills; default 0 */
} ebbtide_policy;
#define EBBTIDE_POLICY_INIT {sizeof(ebbtide_policy), EBBTIDE_BACKUP_RAM, 0, EBBTIDE_OVERFLOW_NONE, 0}

/* A new allocation: size rounded up to the device's granularity, zeroed, resident. policy NULL is the default policy. */
EBBTIDE_API ebbtide_status ebbtide_alloc(const char* tag, const ebbtide_policy* policy, int32_t device,
                                         uint64_t size_bytes, void** address, ebbtide_error* error);
/* address: exactly what ebbtide_alloc gave, or NULL (nothing happens). Waits for the device, as cudaFree does; never for an operation: memory that an operation holds is freed by it when it ends. During a capture the free is put off. */
EBBTIDE_API ebbtide_status ebbtide_free(void* address, ebbtide_error* error);

typedef enum ebbtide_place {
  EBBTIDE_PLACE_DEVICE = 0,
  EBBTIDE_PLACE_HOST = 1,
  EBBTIDE_PLACE_STORED = 2,
  EBBTIDE_PLACE_DROPPED = 3,
  EBBTIDE_PLACE_MIXED = 4
} ebbtide_place;
typedef struct ebbtide_allocation_info {
  size_t struct_size;
  uint64_t address, size_bytes; /* the whole range; size as rounded */
  uint64_t resident_bytes, stored_bytes;
  int32_t device, place, backup, chunk_count;
  int32_t is_trimmed; /* its memory, or its backup, was given up by ebbtide_trim */
  uint64_t sequence;  /* rises with each allocation */
  char tag[EBBTIDE_TAG_MAX + 1];
  uint64_t host_bytes; /* of the resident ones: in host memory that the device reaches */
  int32_t is_paused;   /* a pause took it and no resume since; what lies on the host may have stayed there, resident */
} ebbtide_allocation_info;
#define EBBTIDE_ALLOCATION_INFO_INIT {sizeof(ebbtide_allocation_info), 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, {0}, 0, 0}
/* address may lie anywhere inside an allocation. *found is 0 and *info untouched where it is not ours. Never waits for an operation. */
EBBTIDE_API ebbtide_status ebbtide_find(const void* address, int* found, ebbtide_allocation_info* info,
                                        ebbtide_error* error);
/* True where any byte of [address, address + size) lies in one of our allocations and is not resident. Cheap: for checks before each op. */
EBBTIDE_API int ebbtide_is_away(const void* address, uint64_t size_bytes);
/* Does what ebbtide_find does from inside a signal handler: takes no lock that it could not get at once. Returns 1 and fills tag (capacity bytes) if known. */
EBBTIDE_API int ebbtide_find_in_handler(const void* address, char* tag, size_t capacity, int* is_away);

/* --- slots: how a torch pool knows its region -------------------------------------------------------------------------- */
/* The slot of (tag, policy, device): the same combination has the same slot for ever. A STATE_ERROR when all EBBTIDE_SLOT_COUNT are taken. Makes the tag known. */
#define EBBTIDE_SLOT_COUNT 4096
EBBTIDE_API ebbtide_status ebbtide_bind_slot(const char* tag, const ebbtide_policy* policy, int32_t device,
                                             int32_t* slot, ebbtide_error* error);
/* NULL when out of memory (after ebbtide gave its own caches back) or on any other failure, which is logged. stream: for capture detection only, may be NULL. */
EBBTIDE_API void* ebbtide_slot_alloc(int32_t slot, uint64_t size_bytes, void* stream);
/* ebbtide_free for callers that can't take an error: what goes wrong is logged. In a forked child it does nothing. */
EBBTIDE_API void ebbtide_slot_free(void* address);
/* The two addresses that torch.cuda.memory.CUDAPluggableAllocator takes for this slot: void *malloc(ssize_t, int, void *), void free(void *, ssize_t, int, void *). */
EBBTIDE_API ebbtide_status ebbtide_torch_functions(int32_t slot, void** malloc_function, void** free_function,
                                                   ebbtide_error* error);

/* --- leases ----------------------------------------------------------------------------------------------------------- */
/* While a lease on a tag is open, pausing the tag is a STATE_ERROR that names holder. epoch counts the pauses of the tag, is_away says whether any of its memory is away now: a pool may be entered if !is_away, or if the pool was made in this epoch. */
typedef struct ebbtide_lease {
  size_t struct_size;
  uint64_t id, epoch;
  int32_t is_away;
} ebbtide_lease;
#define EBBTIDE_LEASE_INIT {sizeof(ebbtide_lease), 0, 0, 0}
EBBTIDE_API ebbtide_status ebbtide_open_lease(const char* tag, const char* holder, ebbtide_lease* lease,
                                              ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_close_lease(uint64_t id, ebbtide_error* error);
/* The number of the newest lease of all: what a request says in unused_as_of. */
EBBTIDE_API uint64_t ebbtide_last_lease(void);

/* --- captures --------------------------------------------------------------------------------------------------------- */
/* Around a stream capture of any thread. begin waits for the operation that runs; while a capture is open no operation starts (STATE_ERROR) and frees are put off. Not by a thread that holds a claim: it would wait for itself. */
EBBTIDE_API ebbtide_status ebbtide_begin_capture(ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_end_capture(ebbtide_error* error);

/* --- operations ------------------------------------------------------------------------------------------------------- */
typedef enum ebbtide_operation_kind {
  EBBTIDE_PAUSE = 0,
  EBBTIDE_RESUME = 1,
  EBBTIDE_PREPARE = 3,
  EBBTIDE_TRIM = 4,
  EBBTIDE_PROMOTE = 6
} ebbtide_operation_kind;

typedef struct ebbtide_range {
  uint64_t address, size_bytes;
} ebbtide_range;

typedef struct ebbtide_moved ebbtide_moved; /* the allocations that a pause took memory from: ebbtide_make_moved */
typedef struct ebbtide_request {
  size_t struct_size;
  const char* const* tags; /* tag_count names; duplicates are one */
  size_t tag_count;        /* 0: every tag */
  int32_t missing_ok;      /* 1: a tag that nobody ever named is skipped; 0: a STATE_ERROR that lists the known ones */
  int32_t backup;          /* pause: ebbtide_backup_kind for this once; default AS_ALLOCATED */
  /* address_count allocations by their first address: only these of the tags. What is to leave and shares a handle with others of its tag, with which a resume brought it back, gets memory of its own first, at the same address: nothing may use those others meanwhile. A pause or swap is a STATE_ERROR where the device has no room for that; EBBTIDE_SHARED_HANDLE 0 lets none share. */
  const void* const* addresses;
  size_t address_count; /* 0: all of them, but for trimmed ones */
  int32_t retain;       /* resume: 1 or 0 instead of each allocation's policy; default -1: what the policies say */
  /* pause, resume: unused_count ranges by address that nobody uses: their content may go, and need not come back. True as of the moment when lease unused_as_of was the newest; ignored where a tag was leased later. */
  const ebbtide_range* unused;
  size_t unused_count;
  uint64_t unused_as_of;
  const ebbtide_range* order; /* resume: order_count ranges whose bytes come first, in this order */
  size_t order_count;
  /* pause: it is filled with what has moved, also where the pause fails midway. resume: only these; what was freed or trimmed since is passed by. Default null. */
  ebbtide_moved* moved;
} ebbtide_request;
#define EBBTIDE_REQUEST_INIT \
  {sizeof(ebbtide_request), NULL, 0, 0, EBBTIDE_BACKUP_AS_ALLOCATED, NULL, 0, -1, NULL, 0, 0, NULL, 0, NULL}
#ifndef __cplusplus
#define EBBTIDE_TAG(name)                                                                                            \
  (&(ebbtide_request){sizeof(ebbtide_request), (const char* const[]){name}, 1, 0, EBBTIDE_BACKUP_AS_ALLOCATED, NULL, \
                      0, -1, NULL, 0, 0, NULL, 0, NULL})
#endif

typedef struct ebbtide_report ebbtide_report; /* give back with ebbtide_free_report */
typedef struct ebbtide_report_row {
  size_t struct_size;
  const char* tag;
  int32_t device;
  uint64_t bytes;   /* device bytes freed (pause, trim) or claimed (resume, promote); host bytes made ready (prepare) */
  uint64_t copied;  /* bytes that crossed the bus */
  uint64_t skipped; /* bytes with a backup that needed no copy, clean + unused + constant: */
  uint64_t clean;   /* the backup held them already */
  uint64_t unused;  /* nobody uses them */
  uint64_t constant; /* one repeated value; on the way back unused ones too */
} ebbtide_report_row;
typedef struct ebbtide_report_totals {
  size_t struct_size;
  int32_t kind; /* ebbtide_operation_kind */
  uint64_t bytes, copied, skipped;
  double seconds;
  uint64_t clean, unused, constant;
} ebbtide_report_totals;
#define EBBTIDE_REPORT_TOTALS_INIT {sizeof(ebbtide_report_totals), 0, 0, 0, 0, 0.0, 0, 0, 0}
typedef void (*ebbtide_visit_row)(void* user, const ebbtide_report_row* row);
EBBTIDE_API ebbtide_status ebbtide_read_report(const ebbtide_report* report, ebbtide_report_totals* totals,
                                               ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_visit_report(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                                                ebbtide_error* error); /* a row for each (tag, device) that moved */
EBBTIDE_API ebbtide_status
ebbtide_visit_left(const ebbtide_report* report, ebbtide_visit_row visit, void* user,
                   ebbtide_error* error); /* what ebbtide still holds on devices after it: bytes by (tag, device) */
EBBTIDE_API void ebbtide_free_report(ebbtide_report* report);

/* For a request's moved: a resume of what a pause has moved, and of nothing else. Pause with a fresh one, resume with the same, and with the tags that ebbtide_visit_moved tells (none: every tag is held meanwhile).
 * ebbtide_pause_count: how many pauses have moved anything of the tag, so that one can tell whether it was paused again since; 0 for an unknown tag. */
EBBTIDE_API ebbtide_status ebbtide_make_moved(ebbtide_moved** moved, ebbtide_error* error);
typedef void (*ebbtide_visit_name)(void* user, const char* tag);
EBBTIDE_API ebbtide_status ebbtide_visit_moved(const ebbtide_moved* moved, ebbtide_visit_name visit, void* user,
                                               ebbtide_error* error);
EBBTIDE_API void ebbtide_free_moved(ebbtide_moved* moved);
EBBTIDE_API ebbtide_status ebbtide_pause_count(const char* tag, uint64_t* count, ebbtide_error* error);

/* claim and commit in one call. report may be NULL; an empty selection is an empty report. When they fail before the first byte is given up everything is as it was; after that the tag is partial and the same call, made again, finishes it. */
EBBTIDE_API ebbtide_status ebbtide_pause(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_resume(const ebbtide_request* request, ebbtide_report** report,
                                          ebbtide_error* error);

/* Both directions at once: the tags of leaving are paused, those of returning resumed; neither may be empty, and no tag in both. Device memory stays within the larger of the two plus 256 MiB (or the
 * largest chunk that comes back), host memory within what both need. OUT_OF_MEMORY and STORE_ERROR before anything moves leave both as they were; after a later failure pause and resume finish either. */
EBBTIDE_API ebbtide_status ebbtide_swap(const ebbtide_request* leaving, const ebbtide_request* returning,
                                        ebbtide_report** pause_report, ebbtide_report** resume_report,
                                        ebbtide_error* error);

/* Takes the memory of backups (pages, pins, file space) now, so that the next pause of the tags waits for none. Allocations that have one are left alone. */
EBBTIDE_API ebbtide_status ebbtide_prepare(const ebbtide_request* request, ebbtide_report** report,
                                           ebbtide_error* error);

/* Gives up the memory of the allocations at request->addresses, of which the caller knows that nobody uses them: their content is dropped, their tags are not paused. ebbtide_resume with the same
 * addresses brings it back, zeroed; one without addresses does not. Of those that are away the backups go, but for what somebody looks at (ebbtide_backup_of). STATE_ERROR while a lease on their tag is open, unless all of them are away. What came back behind one handle with them gets memory of its own first, at the same address: nothing may use it meanwhile, and a
 * DRIVER_ERROR may leave some of it away, until ebbtide_resume or ebbtide_pause. */
EBBTIDE_API ebbtide_status ebbtide_trim(const ebbtide_request* request, ebbtide_report** report, ebbtide_error* error);

/* Moves what spilled to the host to the device, the oldest first, as far as there is room beyond EBBTIDE_RESERVE; the rest stays where it is. Addresses and bytes stay the same. STATE_ERROR while a lease on a tag is open; nothing of the tags may be in use meanwhile. */
EBBTIDE_API ebbtide_status ebbtide_promote(const ebbtide_request* request, ebbtide_report** report,
                                           ebbtide_error* error);

/* A resume that returns once everything is mapped: kernels may use what has arrived. Its tags are held until the bytes are there; a pause that comes meanwhile waits. */
typedef struct ebbtide_pending ebbtide_pending;
EBBTIDE_API ebbtide_status ebbtide_resume_async(const ebbtide_request* request, ebbtide_pending** pending,
                                                ebbtide_error* error);
/* Lets a stream of this device (a CUstream) wait for the bytes of range_count ranges, 0: for all. What is not on its way is there. The stream also goes on when the resume failed. */
EBBTIDE_API ebbtide_status ebbtide_pending_stream_wait(ebbtide_pending* pending, int32_t device, void* stream,
                                                       const ebbtide_range* ranges, size_t range_count,
                                                       ebbtide_error* error);
/* Whether the bytes of the range are there, or the resume is over; range NULL: whether it is over. */
EBBTIDE_API ebbtide_status ebbtide_pending_ready(ebbtide_pending* pending, const ebbtide_range* range, int32_t* ready,
                                                 ebbtide_error* error);
/* Waits for the end; its error or its report, each time it is called. report may be NULL. */
EBBTIDE_API ebbtide_status ebbtide_pending_wait(ebbtide_pending* pending, ebbtide_report** report,
                                                ebbtide_error* error);
/* Gives the handle back; waits for the end. */
EBBTIDE_API void ebbtide_free_pending(ebbtide_pending* pending);

/* The two phases apart, for ranks that decide together. A claim holds its tags (other operations on them wait), its budgets and its physical memory until it is committed or abandoned. Both consume the operation,
 * also when they fail. */
typedef struct ebbtide_operation ebbtide_operation;
EBBTIDE_API ebbtide_status ebbtide_claim(ebbtide_operation_kind kind, const ebbtide_request* request,
                                         ebbtide_operation** operation, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_commit(ebbtide_operation* operation, ebbtide_report** report, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_abandon(ebbtide_operation* operation, ebbtide_error* error);

/* The stored bytes of [address, address + size), which must lie in one allocation: *bytes is NULL while any of it is resident or dropped. They stay readable until ebbtide_release_backup, also after a resume. What
 * is written there until then, and before the resume, comes back with it; not while an operation on the tag runs. The next pause copies these blocks, changed or not. A backup that somebody
 * still looks at is not retained by a resume. Waits for an operation on the tag. */
typedef struct ebbtide_backup ebbtide_backup;
EBBTIDE_API ebbtide_status ebbtide_backup_of(const void* address, uint64_t size_bytes, void** bytes,
                                             ebbtide_backup** backup, ebbtide_error* error);
EBBTIDE_API void ebbtide_release_backup(ebbtide_backup* backup);

/* --- what is there ---------------------------------------------------------------------------------------------------- */
typedef enum ebbtide_tag_state { EBBTIDE_RESIDENT, EBBTIDE_PAUSED, EBBTIDE_PARTIAL, EBBTIDE_EMPTY } ebbtide_tag_state;
typedef struct ebbtide_tag_info {
  size_t struct_size;
  const char* tag;
  int32_t state; /* PAUSED: an allocation is, and the last operation was whole; PARTIAL: it failed midway */
  int32_t lease_count;
  uint64_t allocation_count, size_bytes, resident_bytes, stored_bytes, dropped_bytes;
  uint64_t trimmed_bytes;  /* of allocations that ebbtide_trim gave up; not among the dropped ones */
  uint64_t retained_bytes; /* host memory and disk space of backups that are kept while their content is resident */
  uint64_t host_bytes;     /* of the resident ones: in host memory that the device reaches */
  uint64_t left_bytes;     /* of these: of paused allocations, where a pause with a backup leaves them */
} ebbtide_tag_info;
#define EBBTIDE_TAG_INFO_INIT {sizeof(ebbtide_tag_info), NULL, EBBTIDE_EMPTY, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
typedef void (*ebbtide_visit_tag)(void* user, const ebbtide_tag_info* info);
EBBTIDE_API ebbtide_status ebbtide_visit_tags(ebbtide_visit_tag visit, void* user, ebbtide_error* error);
/* The one tag of this name, at the same cost with any number of tags. *found is 0 and *info, which may be NULL, untouched where nobody ever named it. With found NULL that is the STATE_ERROR of an operation, which
 * lists the known ones. */
EBBTIDE_API ebbtide_status ebbtide_query_tag(const char* tag, int* found, ebbtide_tag_info* info, ebbtide_error* error);
typedef void (*ebbtide_visit_allocation)(void* user, const ebbtide_allocation_info* info);
EBBTIDE_API ebbtide_status ebbtide_visit_allocations(const char* tag, ebbtide_visit_allocation visit, void* user,
                                                     ebbtide_error* error); /* tag NULL: all; oldest first */

typedef struct ebbtide_stats {
  size_t struct_size;                                    /* set it first */
  uint64_t allocation_count, device_bytes, stored_bytes; /* of living allocations; held_bytes of a device counts all */
  uint64_t host_held_bytes;      /* host memory that ebbtide holds: backups and the staging ring */
  uint64_t host_available_bytes; /* what it could still take, by RAM, cgroups, host_limit and host_margin */
  uint64_t staging_bytes;        /* pinned memory of the rings */
  uint64_t alloc_calls, free_calls, alloc_failures, pauses, resumes, operation_failures;
  uint64_t bytes_paused, bytes_resumed, bytes_to_host, bytes_to_device;
  uint64_t deferred_frees, deferred_undos; /* put off by a capture or a failure: frees; releases of driver objects */
  uint64_t pinned_bytes;                   /* rings and pinned backups */
  uint64_t bytes_clean, bytes_unused, bytes_constant; /* of pauses: what needed no copy, by reason */
  uint64_t host_bytes, host_pool_bytes;               /* of allocations, on the host; kept for the next spill */
  uint64_t spills, bytes_spilled, bytes_promoted;     /* allocations that spilled, and what went which way, so far */
} ebbtide_stats;
EBBTIDE_API ebbtide_status ebbtide_get_stats(ebbtide_stats* stats, ebbtide_error* error);

/* The newest 1,024 events, oldest first. kind: "pause", "resume", "swap", "prepare", "trim", "separate" (of what a trim wants from what it shares a handle with), "promote", each also with "_failed", and "out_of_memory". */
typedef struct ebbtide_event {
  size_t struct_size;
  uint64_t sequence;
  double unix_seconds, seconds; /* when it ended, how long it took */
  const char *kind, *tags;      /* tags joined by ", "; of many the first ones, and how many more */
  uint64_t bytes, copied;
  const char* detail; /* the error's message, or "" */
} ebbtide_event;
typedef void (*ebbtide_visit_event)(void* user, const ebbtide_event* event);
EBBTIDE_API ebbtide_status ebbtide_visit_events(uint64_t after_sequence, ebbtide_visit_event visit, void* user,
                                                ebbtide_error* error);
#ifdef __cplusplus
}
#endif
#endif
