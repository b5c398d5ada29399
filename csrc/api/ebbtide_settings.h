/* ebbtide's settings: their list, the form of their values, and setting them by name. A part of the C API, version 1;
 * see ebbtide.h for its conventions.
 *
 * csrc/base/settings.def is the list, docs/settings.md shows it.
 */
#ifndef EBBTIDE_SETTINGS_H
#define EBBTIDE_SETTINGS_H

#include "ebbtide.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ebbtide_setting {
  const char* name;     /* "device_limit" */
  const char* variable; /* "EBBTIDE_DEVICE_LIMIT" */
  const char* kind;     /* "size", "switch", "choice", "count", "tag", "folder" or "file" */
  const char* values;   /* choices and switches: "split|whole"; counts: "1|256", least and most; else "" */
  const char* fallback; /* in force while nothing sets it: a value, or words */
  const char* readers;  /* some of "core preload python simulator" */
  const char* meaning;
  const char* none;    /* the meaning of NULL to ebbtide_configure; "" where it is refused */
  bool configurable;   /* ebbtide_configure takes it */
  bool run_option;     /* `ebbtide run` has an option for it */
  const char* source;  /* the source of the value in force: "default", the variable, or "configured" by the program */
  const char* problem; /* an error of the variable, or of a chosen folder of disk backups; "" for none */
} ebbtide_setting;
typedef void (*ebbtide_visit_setting)(void* user, const ebbtide_setting* setting);
/* Every setting, in the order of the documentation. Problems that are shown here are not written to stderr any more. */
EBBTIDE_API ebbtide_status ebbtide_visit_settings(ebbtide_visit_setting visit, void* user, ebbtide_error* error);

/* Whether text (size bytes) is a value of the setting: INVALID_ARGUMENT says why not, in a sentence that begins with
 * label (NULL: the setting's name). disk_directory: STORE_ERROR where no backup could be made there. Writes the value
 * in its plain form to checked ("1.5KiB" is "1536"; NULL for none) and its length, without NUL, to *length (NULL for
 * none); capacity counts the NUL. */
EBBTIDE_API ebbtide_status ebbtide_check_setting(const char* name, const char* text, size_t size, const char* label,
                                                 char* checked, size_t capacity, size_t* length, ebbtide_error* error);

/* Whether backups could be made in path if both disk_directory and disk_files were set to these: STORE_ERROR says why
 * not. For a caller that checks all before it sets any. */
EBBTIDE_API ebbtide_status ebbtide_check_disk_directory(const char* path, const char* files, ebbtide_error* error);

/* Sets an option of saver.configure, from now on; value NULL: as `none` says. Errors are those of
 * ebbtide_check_setting, or that this machine has less memory than that, and nothing is set then. */
EBBTIDE_API ebbtide_status ebbtide_configure(const char* name, const char* value, ebbtide_error* error);

/* The value in force of an option of saver.configure, whatever set it, in its plain form: "" where NULL would set it,
 * and for a disk_directory that was not configured. A NULL value only tells the length. capacity counts the NUL. */
EBBTIDE_API ebbtide_status ebbtide_get_setting(const char* name, char* value, size_t capacity, size_t* length,
                                               ebbtide_error* error);

/* Whether text (size bytes) is a tag, which ebbtide.h describes: INVALID_ARGUMENT says why not. */
EBBTIDE_API ebbtide_status ebbtide_check_tag(const char* text, size_t size, ebbtide_error* error);

/* Any string (size bytes) as a tag, for programs whose tags are not restricted. A tag without '%' stays as it is.
 * Bytes that a tag cannot hold, and '%', become '%' and two hexadecimal digits each; "" becomes "%". A result longer
 * than EBBTIDE_TAG_MAX becomes its beginning after "%~" and a hash. tag has room for EBBTIDE_TAG_MAX + 1 bytes. */
EBBTIDE_API ebbtide_status ebbtide_encode_tag(const char* text, size_t size, char* tag, ebbtide_error* error);
/* The string that became this tag; one that was cut is known to the process that encoded it, others get the tag. Writes
 * the string and a NUL if capacity suffices (text NULL: nothing), and its length without the NUL to *length. */
EBBTIDE_API ebbtide_status ebbtide_decode_tag(const char* tag, char* text, size_t capacity, size_t* length,
                                              ebbtide_error* error);

#ifdef __cplusplus
}
#endif
#endif
