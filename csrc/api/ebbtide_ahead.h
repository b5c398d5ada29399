/* Copies ahead of a pause. A part of the C API, version 1; ebbtide.h includes this header and has its conventions. */
#ifndef EBBTIDE_AHEAD_H
#define EBBTIDE_AHEAD_H
#include "ebbtide.h"
#ifdef __cplusplus
extern "C" {
#endif

/* How far copies ahead have come in a tag, and how large a step is. Begin with EBBTIDE_AHEAD_INIT, and pass the same
 * struct to each step. */
typedef struct ebbtide_ahead {
  uint64_t step_bytes;      /* one call copies at most this, at least 2 MiB; default 32 MiB */
  int32_t threads;          /* at most so many share the copy, and at most one for every 4 cores that the process may
                             * use; default 0: as many as a pause uses */
  bool is_over;             /* nothing is left */
  bool is_held_up;          /* the call did nothing, since a stream capture is under way */
  uint64_t next_allocation; /* where the next step begins: the sequence of an allocation, and an offset in it */
  uint64_t next_offset;
  /* unused_count address ranges that were not in use when the copies began: no need to copy them. One that is used by
   * now is copied by the pause. Read during each call. */
  const ebbtide_range* unused;
  size_t unused_count;
} ebbtide_ahead;
#define EBBTIDE_AHEAD_INIT {33554432, 0, false, false, 0, 0, NULL, 0}

/* One step of copying used memory into its backup, so that the next pause of the tag copies only the blocks that
 * changed since: call it until progress->is_over, in a thread of its own and with pauses between the calls where the
 * program's own copies go first. Kernels may use the memory, and write it. A step skips memory that has a backup with
 * the same bytes already or none by its policy, is away, on the host or of one repeated value, and memory whose backup
 * has a view (ebbtide_backup_of, ebbtide_retained_backup_of).
 *
 * The tag is held for the length of a step: pauses of it wait so long, the beginning of a capture too. Memory that is
 * freed meanwhile goes back at the end of the step, and an allocation that finds too little waits for that. A step that
 * reaches an allocation with a pinned backup pins all of that backup first (8 GiB: 0.2 s and more). Captures that
 * ebbtide was not told of stay whole, unless memory was freed beside the step: a free waits for the device.
 *
 * Host memory is held until a resume of the tag that does not retain it, or until the tag's memory is freed. It goes
 * earlier where a pause or an allocation would else be refused for want of host memory. With the setting copy_ahead, a
 * resume keeps the backup unless it is told otherwise, so that later steps copy only changes. Afterwards a
 * retained backup shows a block that is copied here as of the step, not of the last pause. After an error the same step
 * may be tried again.
 *
 * report may be NULL: copied, and as clean, unused and constant the bytes that needed no copy; the note says where
 * nothing can be copied ahead. STATE_ERROR for an unknown tag; STORE_ERROR where the host has too little memory. */
EBBTIDE_API ebbtide_status ebbtide_copy_ahead(const char* tag, ebbtide_ahead* progress, ebbtide_report** report,
                                              ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
