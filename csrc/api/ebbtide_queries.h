/* The state of ebbtide: allocations, tags, statistics and events. A part of the C API, version 1; ebbtide.h includes
 * this header and has its conventions. */
#ifndef EBBTIDE_QUERIES_H
#define EBBTIDE_QUERIES_H
#include "ebbtide.h"
#ifdef __cplusplus
extern "C" {
#endif

/* --- allocations -------------------------------------------------------------------------------------------------- */
typedef enum ebbtide_place {
  EBBTIDE_PLACE_DEVICE = 0,
  EBBTIDE_PLACE_HOST = 1,
  EBBTIDE_PLACE_STORED = 2,
  EBBTIDE_PLACE_DROPPED = 3,
  EBBTIDE_PLACE_MIXED = 4
} ebbtide_place;
typedef struct ebbtide_allocation_info {
  uint64_t address, size_bytes; /* the whole range; size as rounded */
  uint64_t resident_bytes, stored_bytes;
  int32_t device, place, backup, chunk_count;
  bool is_exportable;  /* ebbtide_export may give it to other processes */
  bool is_kept;        /* ebbtide_keep */
  bool is_lent;        /* ebbtide_export */
  bool is_trimmed;     /* ebbtide_trim freed its memory or its backup */
  bool is_paused;      /* paused and not resumed since; its bytes on the host may have stayed there, resident */
  uint64_t sequence;   /* rises with each allocation */
  uint64_t host_bytes; /* the resident bytes in host memory that the device reaches */
  char tag[EBBTIDE_TAG_MAX + 1];
} ebbtide_allocation_info;
/* address may lie anywhere inside an allocation. If ebbtide does not own it, *found is false and *info is unchanged.
 * Never waits for an operation. */
EBBTIDE_API ebbtide_status ebbtide_find(const void* address, bool* found, ebbtide_allocation_info* info,
                                        ebbtide_error* error);
/* Whether any byte of [address, address + size) lies in an allocation of ebbtide and is not resident. Cheap enough to
 * check before each operator. */
EBBTIDE_API bool ebbtide_is_away(const void* address, uint64_t size_bytes);
/* The same, but bytes that a resume in the background is bringing count as resident: streams can wait for them. */
EBBTIDE_API bool ebbtide_is_missing(const void* address, uint64_t size_bytes);
/* ebbtide_find for signal handlers: touches no lock, and gives up where a thread is looking something up. Returns true
 * and fills tag (capacity bytes) if address is known. */
EBBTIDE_API bool ebbtide_find_in_handler(const void* address, char* tag, size_t capacity, bool* is_away);

typedef void (*ebbtide_visit_allocation)(void* user, const ebbtide_allocation_info* info);
EBBTIDE_API ebbtide_status ebbtide_visit_allocations(const char* tag, ebbtide_visit_allocation visit, void* user,
                                                     ebbtide_error* error); /* tag NULL: all; oldest first */

/* The decision of the last pause about a block of 2 MiB. */
typedef enum ebbtide_verdict {
  EBBTIDE_VERDICT_NONE = 0,      /* it did not take the block away, or there was none, or a trim came after it */
  EBBTIDE_VERDICT_COPIED = 1,    /* copied: no earlier copy of it was known */
  EBBTIDE_VERDICT_CHANGED = 2,   /* copied, since it differed from the copy of an earlier pause */
  EBBTIDE_VERDICT_CLEAN = 3,     /* not copied: the backup held it already */
  EBBTIDE_VERDICT_UNUSED = 4,    /* not copied: not in use */
  EBBTIDE_VERDICT_CONSTANT = 5,  /* not copied: one repeated value */
  EBBTIDE_VERDICT_DROPPED = 6,   /* not copied: without a backup */
  EBBTIDE_VERDICT_ON_HOST = 7,   /* not copied: it lay in host memory, and stayed there */
  EBBTIDE_VERDICT_UNCOMPARED = 8 /* copied without a look at the earlier copy: the options said so, or no memory could
                                    be pinned for it, or a change was wrongly expected */
} ebbtide_verdict;
/* Bytes that lie one after the other, in the same place and with the same verdict. */
typedef struct ebbtide_stretch {
  uint64_t address, size_bytes;
  int32_t place;   /* ebbtide_place, never mixed */
  int32_t verdict; /* ebbtide_verdict */
} ebbtide_stretch;
typedef void (*ebbtide_visit_stretch)(void* user, const ebbtide_stretch* stretch);
/* Visits [address, address + size) in order, as far as it lies in one allocation of ebbtide; nothing if address does
 * not. Never waits for an operation: while one moves the allocation, places are as of now, and verdicts are those of
 * the pause before. */
EBBTIDE_API ebbtide_status ebbtide_visit_stretches(const void* address, uint64_t size_bytes,
                                                   ebbtide_visit_stretch visit, void* user, ebbtide_error* error);

/* --- tags --------------------------------------------------------------------------------------------------------- */
typedef enum ebbtide_tag_state { EBBTIDE_RESIDENT, EBBTIDE_PAUSED, EBBTIDE_PARTIAL, EBBTIDE_EMPTY } ebbtide_tag_state;
typedef struct ebbtide_tag_info {
  const char* tag;
  int32_t state; /* PAUSED: an allocation is, and the last operation completed; PARTIAL: it failed midway */
  int32_t lease_count;
  uint64_t allocation_count, size_bytes, resident_bytes, stored_bytes, dropped_bytes;
  uint64_t trimmed_bytes;     /* of allocations that ebbtide_trim freed; not counted in dropped_bytes */
  uint64_t retained_bytes;    /* host memory and disk space of backups that are kept while their content is resident */
  uint64_t host_bytes;        /* the resident bytes in host memory that the device reaches */
  uint64_t paused_host_bytes; /* the host_bytes of paused allocations, where a pause with a backup leaves them */
  uint64_t detached_bytes;    /* whole in memory that a failed trim, promote or demote could not map again: away until a
                                 resume */
  uint64_t ahead_bytes;       /* resident, and in a backup with a digest: a pause copies only changes since then */
  uint64_t kept_bytes;        /* resident, and operations pass it by (ebbtide_keep) */
  int32_t backups;            /* bit 1 << ebbtide_backup for each kind that holds bytes of it or that its resident
                                 bytes get by default, and for EBBTIDE_BACKUP_NONE where content was dropped */
  bool is_hooked;             /* memory that the program allocated outside regions has it (ebbtide_threads.h) */
} ebbtide_tag_info;
typedef void (*ebbtide_visit_tag)(void* user, const ebbtide_tag_info* info);
EBBTIDE_API ebbtide_status ebbtide_visit_tags(ebbtide_visit_tag visit, void* user, ebbtide_error* error);
/* The tag of this name, at a cost that does not depend on the number of tags. info may be NULL. If the tag is unknown,
 * *found is false and *info is unchanged; with found NULL it is the STATE_ERROR of an operation, which lists the known
 * tags.
 */
EBBTIDE_API ebbtide_status ebbtide_query_tag(const char* tag, bool* found, ebbtide_tag_info* info,
                                             ebbtide_error* error);

/* --- statistics --------------------------------------------------------------------------------------------------- */
/* The one list of the statistics: FIELD(name, meaning). struct ebbtide_stats, the dictionary of saver.stats() and its
 * table in docs/api.md follow it. */
#define EBBTIDE_STATS(FIELD)                                                                \
  FIELD(allocation_count, "allocations that exist now")                                     \
  FIELD(device_bytes, "bytes of allocations on devices")                                    \
  FIELD(stored_bytes, "bytes of allocations in backups")                                    \
  FIELD(host_held_bytes, "host memory that ebbtide holds, all kinds together")              \
  FIELD(host_available_bytes, "host memory it may still take: RAM, cgroups, limit, margin") \
  FIELD(staging_bytes, "pinned memory of the rings between device and host")                \
  FIELD(alloc_calls, "calls that allocate so far, failed ones too")                         \
  FIELD(free_calls, "calls that free so far")                                               \
  FIELD(alloc_failures, "allocations that failed")                                          \
  FIELD(pauses, "pauses so far")                                                            \
  FIELD(resumes, "resumes so far")                                                          \
  FIELD(operation_failures, "operations that failed")                                       \
  FIELD(bytes_paused, "device bytes freed by pauses")                                       \
  FIELD(bytes_resumed, "device bytes claimed by resumes")                                   \
  FIELD(bytes_to_host, "bytes that pauses copied to the host")                              \
  FIELD(bytes_to_device, "bytes that resumes copied to the device")                         \
  FIELD(deferred_frees, "frees deferred by a capture, not done yet")                        \
  FIELD(deferred_undos, "releases of driver objects deferred by a failure, not done yet")   \
  FIELD(pinned_bytes, "pinned memory: rings, pinned backups, host memory of LMS")           \
  FIELD(bytes_clean, "bytes that pauses skipped as unchanged")                              \
  FIELD(bytes_unused, "bytes that pauses skipped as unused")                                \
  FIELD(bytes_constant, "bytes that pauses skipped as one repeated value")                  \
  FIELD(host_bytes, "bytes of allocations that lie on the host and are resident")           \
  FIELD(host_pool_bytes, "host memory kept for the next spill")                             \
  FIELD(spills, "allocations that spilled to the host")                                     \
  FIELD(bytes_spilled, "bytes that spilled to the host")                                    \
  FIELD(bytes_promoted, "bytes that promotions moved to the device")                        \
  FIELD(bytes_demoted, "bytes that demotions moved to the host")

typedef struct ebbtide_stats { /* set it first */
#define EBBTIDE_STATS_FIELD(name, meaning) uint64_t name;
  EBBTIDE_STATS(EBBTIDE_STATS_FIELD)
#undef EBBTIDE_STATS_FIELD
} ebbtide_stats;
EBBTIDE_API ebbtide_status ebbtide_get_stats(ebbtide_stats* stats, ebbtide_error* error);

/* --- events ------------------------------------------------------------------------------------------------------- */
/* The newest 1,024 events, oldest first. kind: "pause", "resume", "swap", "prepare", "trim", "promote", "demote" or
 * "separate" (a trim gives allocations that share a handle one of their own), each also with "_failed"; and
 * "out_of_memory". */
typedef struct ebbtide_event {
  uint64_t sequence;
  double unix_seconds, seconds; /* when it ended; how long it took */
  const char *kind, *tags;      /* tags joined by ", "; of many, the first ones and the number of the rest */
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
