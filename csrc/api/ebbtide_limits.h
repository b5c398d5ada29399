/* ebbtide's limits and options. A part of the C API, version 1; ebbtide.h includes this header and has its conventions.
 * docs/settings.md describes each of them, and ebbtide_settings.h sets them by name. */
#ifndef EBBTIDE_LIMITS_H
#define EBBTIDE_LIMITS_H
#include "ebbtide.h"
#ifdef __cplusplus
extern "C" {
#endif

/* In bytes. The default is EBBTIDE_UNLIMITED unless another is given here; RAM and cgroups always bound host memory. */
typedef enum ebbtide_limit {
  EBBTIDE_DEVICE_LIMIT = 0, /* device memory that ebbtide may hold on each device */
  EBBTIDE_HOST_LIMIT = 1,   /* host memory that ebbtide may hold */
  EBBTIDE_HOST_MARGIN = 2,  /* host memory left to others; default 1 GiB, or 1/16 of RAM or container if less */
  EBBTIDE_PINNED_LIMIT = 3, /* pinned memory: rings between device and host, pinned backups, LMS */
  EBBTIDE_RESERVE = 4,      /* device memory that spills leave free; UNLIMITED: 512 MiB or 1/16, whichever is smaller */
  EBBTIDE_HOST_POOL = 5,    /* host memory kept for the next spill, at most RAM; default 0 */
  EBBTIDE_SHARED_HANDLE = 6, /* size of a handle that neighbours share after a resume; default 1 GiB; 0: none */
  EBBTIDE_DEVICE_MARGIN = 7  /* free device memory that allocations leave to others; default 0 */
} ebbtide_limit;
EBBTIDE_API ebbtide_status ebbtide_set_limit(ebbtide_limit limit, uint64_t bytes, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_limit(ebbtide_limit limit, uint64_t* bytes, ebbtide_error* error);

/* For EBBTIDE_OVERFLOW_WHOLE: a share, 0 to 1, of the device's free memory beyond the reserve; default 0.6. */
EBBTIDE_API ebbtide_status ebbtide_set_whole_fraction(double fraction, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_whole_fraction(double* fraction, ebbtide_error* error);
/* Fills the host pool up to EBBTIDE_HOST_POOL, with memory near this device. STORE_ERROR if the host has too little;
 * the part already made stays, and is given up when backups or spills need the room. */
EBBTIDE_API ebbtide_status ebbtide_fill_host_pool(int32_t device, ebbtide_error* error);

/* Which blocks a pause may skip, and what dropped memory comes back as: 1 or 0. The default is 1, and 0 for
 * COMPARE_BYTES, POISON and COPY_AHEAD. */
typedef enum ebbtide_option {
  EBBTIDE_SKIP_CLEAN = 0,    /* blocks of 2 MiB with the 128-bit digest of their backup (false with odds of 2^-128) */
  EBBTIDE_SKIP_UNUSED = 1,   /* ranges that the request lists as unused */
  EBBTIDE_SKIP_CONSTANT = 2, /* blocks of one repeated value of 16 bytes */
  EBBTIDE_COMPARE_BYTES = 3, /* copies and compares blocks with equal digests; rewrites them in pinned backups */
  EBBTIDE_POISON = 4,        /* memory whose content was dropped comes back as bytes 0xEB instead of zeros */
  EBBTIDE_COPY_AHEAD = 5     /* a caller keeps what was resumed ahead (ebbtide_copy_ahead); ebbtide only notes it */
} ebbtide_option;
EBBTIDE_API ebbtide_status ebbtide_set_option(ebbtide_option option, int32_t value, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_get_option(ebbtide_option option, int32_t* value, ebbtide_error* error);

/* The folder of future disk backups; NULL: EBBTIDE_DISK_DIRECTORY, else TMPDIR, else /var/tmp. A relative path means
 * the folder that it names now. STORE_ERROR, and nothing changes, if no backup can be made in it. */
EBBTIDE_API ebbtide_status ebbtide_set_disk_directory(const char* path, ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
