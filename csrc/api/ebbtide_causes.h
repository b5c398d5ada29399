/* The causes of refusals, for callers that add advice of their own to ebbtide_error.message. A part of the C API,
 * version 1; ebbtide.h includes this header and has its conventions. */
#ifndef EBBTIDE_CAUSES_H
#define EBBTIDE_CAUSES_H

/* The cause in an ebbtide_error. The message names settings as ebbtide_configure does, and no language's syntax. More
 * values may be added. */
typedef enum ebbtide_cause {
  EBBTIDE_CAUSE_OTHER = 0,
  EBBTIDE_CAUSE_HOST_MEMORY = 1,     /* RAM, the container's limit or host_limit, each with host_margin */
  EBBTIDE_CAUSE_PINNED_LIMIT = 2,    /* pinned_limit */
  EBBTIDE_CAUSE_PINNING = 3,         /* the system pins no more memory */
  EBBTIDE_CAUSE_DISK_DIRECTORY = 4,  /* the folder of disk backups, or its disk */
  EBBTIDE_CAUSE_DEVICE = 5,          /* the device itself is full */
  EBBTIDE_CAUSE_DEVICE_LIMIT = 6,    /* device_limit */
  EBBTIDE_CAUSE_DEVICE_MARGIN = 7,   /* device_margin */
  EBBTIDE_CAUSE_BACKUP_VIEW = 8,     /* a view of a backup exists */
  EBBTIDE_CAUSE_LMS_LIMIT = 9,       /* the limit of large model support: ebbtide_set_lms_limit */
  EBBTIDE_CAUSE_LMS_HOST_LIMIT = 10, /* its limit for host memory: ebbtide_set_lms_host_limit */
  EBBTIDE_CAUSE_LENT = 11            /* another process uses the memory: ebbtide_export */
} ebbtide_cause;

#endif
