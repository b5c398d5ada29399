/* Large model support: host memory for what was evicted from a device, copies between the two that run beside the
 * kernels, and how much device memory was held at most. ebbtide.h includes this. */
#ifndef EBBTIDE_LMS_H
#define EBBTIDE_LMS_H

#ifdef __cplusplus
extern "C" {
#endif

/* --- host memory -------------------------------------------------------------------------------------------------- */
/* Host memory for size_bytes that are copied to and from this device; it serves all other devices too. The address is
 * a multiple of 256.
 *
 * It is page-locked where possible: within pinned_limit, not during a capture (pinning would break it), and as far as
 * the driver pins; after a refusal it is asked again once slabs were given back. Otherwise it is ordinary memory, and
 * copies are slower and may block. Page-locked memory is slow to make, so it comes in slabs that are kept when their
 * pieces are given back, for the next step; ordinary memory goes back to the system at once. Both are charged on
 * host_limit, slabs as a whole.
 *
 * STORE_ERROR, and *address is NULL, if the host has too little room, even after all free slabs were given back.
 * Nothing is taken then. INVALID_ARGUMENT where there is no such device. */
EBBTIDE_API ebbtide_status ebbtide_take_host_memory(int32_t device, uint64_t size_bytes, void** address,
                                                    ebbtide_error* error);
/* No copy may use the piece any more. INVALID_ARGUMENT for an address that was not taken, or was given back already. */
EBBTIDE_API ebbtide_status ebbtide_give_host_memory(void* address, ebbtide_error* error);
/* Gives back to the system all slabs of which no piece is taken, and what ebbtide_promote kept. STATE_ERROR during a
 * capture, which unpinning would break: nothing is given back then. */
EBBTIDE_API ebbtide_status ebbtide_trim_host_memory(ebbtide_error* error);

typedef struct ebbtide_host_memory_info {
  uint64_t held_bytes;   /* charged on host_limit: slabs and ordinary pieces */
  uint64_t used_bytes;   /* of which pieces take this much; each is rounded up to 256 bytes, or to a page if ordinary */
  uint64_t pinned_bytes; /* page-locked: the slabs. Counts in pinned_bytes of ebbtide_get_stats, too */
} ebbtide_host_memory_info;
EBBTIDE_API ebbtide_status ebbtide_query_host_memory(ebbtide_host_memory_info* info, ebbtide_error* error);

/* --- copies ------------------------------------------------------------------------------------------------------- */
/* ebbtide copies in streams of its own, one for each device and direction. Copies of one stream run one after another,
 * in the order of their begin; the two directions run at the same time.
 *
 *   ebbtide_begin_copy(0, host, device_pointer, bytes, EBBTIDE_TO_HOST, torch_stream, &copy, &error);
 *   ...
 *   if (ebbtide_is_copy_done(copy)) ebbtide_end_copy(copy, NULL, NULL, &error);  // device_pointer may be freed now
 *
 * Until a copy was seen to be complete (is_copy_done gave 1, or wait_for_copy or end_copy gave OK), neither side may be
 * freed, and the destination may only be used, and the source only be written, by streams that were ordered after it.
 *
 * Different copies may be used by any threads. The calls on one copy are made one after another, except
 * ebbtide_is_copy_done, which may be called beside all others but ebbtide_end_copy. */
typedef struct ebbtide_copy ebbtide_copy; /* every one that was begun must be ended: ebbtide_end_copy */
enum ebbtide_copy_direction { EBBTIDE_TO_HOST, EBBTIDE_TO_DEVICE };

/* Queues a copy that begins after everything that is queued in after_stream now: a CUstream of this device's primary
 * context; NULL is its legacy default stream. One side is memory of this device, the other is host memory, and both
 * hold size_bytes.
 *
 * Does not wait for the device if the host memory is page-locked. With ordinary memory the driver may wait, until the
 * copy is complete and everything before it; so may the begin of any other copy in the same direction meanwhile.
 *
 * STATE_ERROR during a capture that ebbtide knows of, and where after_stream or the calling thread captures: the
 * capture goes on unharmed. After any error no copy is under way and *copy is NULL, with one exception: if a queued
 * copy could not even be waited for, the DRIVER_ERROR says so. The device may write the destination and read the source
 * for ever then. Host memory of ebbtide_take_host_memory is not used again, even if it is given back; the caller must
 * not free or reuse the device memory. All later copies of this device and direction are a STATE_ERROR. */
EBBTIDE_API ebbtide_status ebbtide_begin_copy(int32_t device, void* destination, const void* source,
                                              uint64_t size_bytes, int32_t direction, void* after_stream,
                                              ebbtide_copy** copy, ebbtide_error* error);
/* 1 if the copy is complete, else 0. Never waits. It also gives 0, without a question to the driver, during a capture
 * that ebbtide knows of (polling may break captures); 0 where the driver answers with an error, which
 * ebbtide_wait_for_copy reports; and 0 for what is no copy. */
EBBTIDE_API int ebbtide_is_copy_done(const ebbtide_copy* copy);
/* The calling thread waits until the copy is complete. Breaks no capture, and does not wait for the end of one. After a
 * DRIVER_ERROR the copy counts as under way, and it may be waited for again. */
EBBTIDE_API ebbtide_status ebbtide_wait_for_copy(ebbtide_copy* copy, ebbtide_error* error);
/* What is queued in this stream from now on begins after the copy; the thread does not wait. stream: a CUstream of any
 * device; NULL is the legacy default stream of the copy's device. STATE_ERROR where the stream or the calling thread
 * captures: the capture goes on unharmed. The copy may be ended at any time after this call. */
EBBTIDE_API ebbtide_status ebbtide_order_after_copy(ebbtide_copy* copy, void* stream, ebbtide_error* error);
/* Ends the copy: waits for it if it is not complete, and frees its record, also if this fails. seconds, unless NULL:
 * what the copy itself took, without its time in the queue. waited_seconds, unless NULL: how long the first stream that
 * was ordered after it had nothing else to do. Either is 0 where the driver does not tell. May be called during
 * captures. DRIVER_ERROR where it could not be waited for, with the consequences that ebbtide_begin_copy describes.
 * INVALID_ARGUMENT for what is no copy, or was ended already. */
EBBTIDE_API ebbtide_status ebbtide_end_copy(ebbtide_copy* copy, double* seconds, double* waited_seconds,
                                            ebbtide_error* error);

/* --- the limits --------------------------------------------------------------------------------------------------- */
/* The most device memory that ebbtide's own allocations may hold on each device while large model support is on, beside
 * device_limit: the one that leaves less holds. Memory that the program gets from the driver does not count here.
 * EBBTIDE_UNLIMITED ends it. What is held already stays. */
EBBTIDE_API ebbtide_status ebbtide_set_lms_limit(uint64_t bytes, ebbtide_error* error);
/* The same for host memory, beside host_limit. */
EBBTIDE_API ebbtide_status ebbtide_set_lms_host_limit(uint64_t bytes, ebbtide_error* error);
/* Whether large model support makes room for torch's allocations (1), so that the preload library refuses those that do
 * not fit, without a word, and sends none of them to the host; 0: as its settings say, which is the default. */
EBBTIDE_API ebbtide_status ebbtide_leave_torch_to_lms(int32_t is_left, ebbtide_error* error);

/* --- peaks -------------------------------------------------------------------------------------------------------- */
/* Starts a new peak_bytes of ebbtide_query_device, at what is held now, on every device. */
EBBTIDE_API ebbtide_status ebbtide_reset_peaks(ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
