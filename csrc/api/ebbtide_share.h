/* Memory of several processes. A part of the C API, version 1; ebbtide.h includes this header and has its conventions.
 */
#ifndef EBBTIDE_SHARE_H
#define EBBTIDE_SHARE_H
#include "ebbtide.h"
#ifdef __cplusplus
extern "C" {
#endif

/* A piece of an allocation, and a descriptor of it (cuMemExportToShareableHandle), which holds the memory in whatever
 * process it is, and may be sent to others (SCM_RIGHTS). */
typedef struct ebbtide_piece {
  uint64_t size_bytes;
  int32_t file;
} ebbtide_piece;
typedef void (*ebbtide_visit_piece)(void* user, const ebbtide_piece* piece);

/* Visits the pieces of the allocation that contains address, at most 253, in order; the visitor closes the descriptors.
 * Where an operation holds the tag, *is_busy is true, and nothing is visited. From now on the memory is lent: an
 * operation that would take it away is a STATE_ERROR unless its request has before_moving, until ebbtide_end_export has
 * been called as often. STATE_ERROR where the allocation's policy is not exportable, or a part of it is not on the
 * device. */
EBBTIDE_API ebbtide_status ebbtide_export(const void* address, ebbtide_visit_piece visit, void* user, bool* is_busy,
                                          ebbtide_error* error);
/* Does nothing where no allocation contains address. */
EBBTIDE_API ebbtide_status ebbtide_end_export(const void* address, ebbtide_error* error);

/* Whether a borrower of lent memory would refuse: then an operation that would take it away is a STATE_ERROR in any
 * case, until as many no longer refuse. Does nothing where no allocation contains address. */
EBBTIDE_API ebbtide_status ebbtide_refuse_moves(const void* address, bool refuses, ebbtide_error* error);

/* From now on operations pass by the allocation that contains address: it stays on the device, and counts as kept_bytes
 * of its tag, until ebbtide_end_keep has been called as often. Where it shares a handle with its neighbours, it is
 * copied into one of its own. STATE_ERROR where a part of it is not on the device, or the device has no room for that
 * copy. */
EBBTIDE_API ebbtide_status ebbtide_keep(const void* address, ebbtide_error* error);
/* Does nothing where no allocation contains address. */
EBBTIDE_API ebbtide_status ebbtide_end_keep(const void* address, ebbtide_error* error);

/* Maps pieces of another process's memory side by side, at addresses that are never others' until
 * ebbtide_free_import. The caller closes the descriptors. No operation concerns this memory. */
typedef struct ebbtide_import ebbtide_import;
EBBTIDE_API ebbtide_status ebbtide_import_memory(int32_t device, const ebbtide_piece* pieces, size_t count,
                                                 ebbtide_import** import, void** address, ebbtide_error* error);
/* Waits for the device's queued work. STATE_ERROR during a stream capture. */
EBBTIDE_API ebbtide_status ebbtide_wait_import(ebbtide_import* import, ebbtide_error* error);
/* The same, and gives the memory up; the addresses stay. */
EBBTIDE_API ebbtide_status ebbtide_unmap_import(ebbtide_import* import, ebbtide_error* error);
/* The pieces again, of the same sizes. */
EBBTIDE_API ebbtide_status ebbtide_map_import(ebbtide_import* import, const ebbtide_piece* pieces, size_t count,
                                              ebbtide_error* error);
/* Also unmaps. After an error the import is as it was. */
EBBTIDE_API ebbtide_status ebbtide_free_import(ebbtide_import* import, ebbtide_error* error);

/* --- hand-over ---------------------------------------------------------------------------------------------------- */
/* Who gets the memory of a pause, in another process. The functions are called by threads of the pause, one for each
 * device, and may wait. wants: whether a handle of this size may be given. give: the descriptor stays the caller's; the
 * result is false where the receiver is gone. released: so much went to the driver instead. */
typedef struct ebbtide_receiver {
  void* user;
  bool (*wants)(void* user, int32_t device, uint64_t size_bytes);
  bool (*give)(void* user, int32_t device, uint64_t size_bytes, int32_t file);
  void (*released)(void* user, int32_t device, uint64_t size_bytes);
} ebbtide_receiver;
/* A pause that hands exportable memory to the receiver, handle by handle as its bytes get out; the rest is released. */
EBBTIDE_API ebbtide_status ebbtide_hand_over(const ebbtide_request* request, const ebbtide_receiver* receiver,
                                             ebbtide_report** report, ebbtide_error* error);

/* A handle on the device that a pause takes away. Only exportable ones can be given. */
typedef struct ebbtide_leaving {
  uint64_t size_bytes;
  int32_t device;
  bool exportable;
} ebbtide_leaving;
typedef void (*ebbtide_visit_leaving)(void* user, const ebbtide_leaving* leaving);
/* Visits those of the request's tags (none: all), as of now. */
EBBTIDE_API ebbtide_status ebbtide_find_leaving(const ebbtide_request* request, ebbtide_visit_leaving visit, void* user,
                                                ebbtide_error* error);

/* What another process hands over. leaving: what it found so. must_clear: whether its setting clear_handed is 1. */
typedef struct ebbtide_reception ebbtide_reception;
EBBTIDE_API ebbtide_status ebbtide_make_reception(const ebbtide_leaving* leaving, size_t count, bool must_clear,
                                                  ebbtide_reception** reception, ebbtide_error* error);
EBBTIDE_API void ebbtide_free_reception(ebbtide_reception* reception);
/* A resume with that memory: with what the other process holds, never more than the larger side and a margin of 256
 * MiB, or of the largest handle. want is called for each handle that shall be given, and at last with device -1: then
 * the other process may begin, and gives these and no others. What was handed over is overwritten or cleared before
 * anything is resident, but for memory whose content was dropped, where neither side has clear_handed at 1. STATE_ERROR
 * where the other process ended too early or gave nothing for 30 seconds; a resume, called again, finishes. */
typedef bool (*ebbtide_want)(void* user, int32_t device, uint64_t size_bytes); /* false: nothing moves, STATE_ERROR */
EBBTIDE_API ebbtide_status ebbtide_resume_from(const ebbtide_request* request, ebbtide_reception* reception,
                                               ebbtide_want want, void* user, ebbtide_report** report,
                                               ebbtide_error* error);
/* Meanwhile, in another thread: a handle came (its descriptor is closed here in any case, since it holds the memory),
 * memory was released, no more will come. */
EBBTIDE_API ebbtide_status ebbtide_receive(ebbtide_reception* reception, int32_t device, uint64_t size_bytes,
                                           int32_t file, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_note_released(ebbtide_reception* reception, int32_t device, uint64_t size_bytes,
                                                 ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_end_reception(ebbtide_reception* reception, ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
