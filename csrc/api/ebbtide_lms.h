/* Large model support: host memory for what was evicted from a device, and how much device memory was held at most.
 * ebbtide.h includes this. */
#ifndef EBBTIDE_LMS_H
#define EBBTIDE_LMS_H

#ifdef __cplusplus
extern "C" {
#endif

/* Host memory for size_bytes, in whole pages, which are charged on host_limit. STORE_ERROR, and *address is NULL, if
 * the host has too little room. ebbtide_give_host_memory returns it to the system at once; INVALID_ARGUMENT for an
 * address that was not taken, or was given back already. */
EBBTIDE_API ebbtide_status ebbtide_take_host_memory(uint64_t size_bytes, void** address, ebbtide_error* error);
EBBTIDE_API ebbtide_status ebbtide_give_host_memory(void* address, ebbtide_error* error);

/* Starts a new peak_bytes of ebbtide_query_device, at what is held now, on every device. */
EBBTIDE_API ebbtide_status ebbtide_reset_peaks(ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
