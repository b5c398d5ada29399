/* Another preload library that hooks dlsym. It calls the next dlsym as such libraries do: by a call, not by a jump. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static int seen;

void* dlsym(void* handle, const char* symbol) {
  static void* (*next)(void*, const char*);
  if (next == NULL) next = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  if (next == NULL) next = (void* (*)(void*, const char*))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.17");
  if (strncmp(symbol, "cu", 2) == 0) ++seen;
  return next(handle, symbol);
}

__attribute__((destructor)) static void tell(void) { fprintf(stderr, "chain: %d\n", seen); }
