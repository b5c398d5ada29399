#ifndef CAPI_CHECK_H
#define CAPI_CHECK_H

/* What the C programs share: checks that count, and say where they failed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/ebbtide.h"
#include "api/ebbtide_settings.h"

static int failures = 0;
static ebbtide_error error = EBBTIDE_ERROR_INIT;

#define CHECK(condition) \
  ((condition) ? (void)0 : (void)(++failures, fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition)))

static void expect(ebbtide_status got, ebbtide_status wanted, const char* call, int line) {
  const int is_right = got == wanted && (got == EBBTIDE_OK) == (error.message[0] == '\0') && error.status == got;
  if (!is_right) {
    ++failures;
    fprintf(stderr, "%s:%d: %s gives %d, not %d; error.status %d, message \"%s\"\n", __FILE__, line, call, got, wanted,
            error.status, error.message);
  }
}
#define EXPECT(wanted, call) expect((call), (wanted), #call, __LINE__)
#define REFUSED(call) EXPECT(EBBTIDE_INVALID_ARGUMENT, call)
#define SAYS(part) CHECK(strstr(error.message, (part)) != NULL)

enum { MIB = 1 << 20, CHUNK = 2 * MIB };

/* The simulator by HIP's names, with which nothing overflows to the host. */
__attribute__((unused)) static int is_hip(void) {
  const char* const text = getenv("EBBTIDE_SIM_HIP");
  return text != NULL && strcmp(text, "1") == 0;
}

__attribute__((unused)) static void* make(const char* tag) {
  void* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_alloc(tag, NULL, 0, CHUNK, &address, &error));
  return address;
}

/* bytes: EBBTIDE_UNLIMITED for what holds while nothing is set. */
__attribute__((unused)) static ebbtide_status set_limit(const char* setting, uint64_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%llu", (unsigned long long)bytes);
  return ebbtide_configure(setting, bytes == EBBTIDE_UNLIMITED ? NULL : text, &error);
}

/* The setting's value, up to the next call. */
__attribute__((unused)) static const char* setting_of(const char* setting) {
  static char text[128];
  EXPECT(EBBTIDE_OK, ebbtide_get_setting(setting, text, sizeof text, NULL, &error));
  return text;
}

static int report_failures(void) {
  if (failures > 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures > 0 ? 1 : 0;
}

#endif
