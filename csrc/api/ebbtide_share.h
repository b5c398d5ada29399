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
 * From now on the memory stays where it is: an operation that would take it away is a STATE_ERROR until
 * ebbtide_end_export has been called as often. Waits while an operation has the tag. STATE_ERROR where the allocation's
 * policy is not exportable, or a part of it is not on the device. */
EBBTIDE_API ebbtide_status ebbtide_export(const void* address, ebbtide_visit_piece visit, void* user,
                                          ebbtide_error* error);
/* Does nothing where no allocation contains address. */
EBBTIDE_API ebbtide_status ebbtide_end_export(const void* address, ebbtide_error* error);

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

#ifdef __cplusplus
}
#endif
#endif
