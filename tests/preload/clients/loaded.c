/* A client that finds the driver at run time, in each of the ways that programs use. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "api.h"

typedef CUresult (*resolver_4)(const char*, void**, int, cuuint64_t);
typedef CUresult (*resolver_5)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

static int missing(const char* name) {
  fprintf(stderr, "client: no %s\n", name);
  return 1;
}

/* As XLA: dlsym for each name. */
static int by_name(void* library, struct api* api) {
#define TAKE(name, version, per_thread_version)       \
  *(void**)&api->name = dlsym(library, SYMBOL(name)); \
  if (api->name == NULL) return missing(SYMBOL(name));
  EVERY_FUNCTION(TAKE)
#undef TAKE
  return 0;
}

/* As cudart 12 and later. */
static int by_resolver_5(resolver_5 find, int is_per_thread, struct api* api) {
  const cuuint64_t flags = is_per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_DEFAULT;
#define TAKE(name, version, per_thread_version)                                                                     \
  if (find(#name, (void**)&api->name, is_per_thread ? per_thread_version : version, flags, NULL) != CUDA_SUCCESS || \
      api->name == NULL)                                                                                            \
    return missing(#name);
  EVERY_FUNCTION(TAKE)
#undef TAKE
  return 0;
}

/* As cudart 11.3 to 11.8. */
static int by_resolver_4(resolver_4 find, struct api* api) {
#define TAKE(name, version, per_thread_version) \
  if (find(#name, (void**)&api->name, version, 0) != CUDA_SUCCESS || api->name == NULL) return missing(#name);
  EVERY_FUNCTION(TAKE)
#undef TAKE
  return 0;
}

static int by_cudart(const char* way, void* library, struct api* api) {
  void* found = NULL;
  CUdriverProcAddressQueryResult status;
  if (strcmp(way, "cudart11") == 0) {
    const resolver_4 find = (resolver_4)dlsym(library, "cuGetProcAddress");
    if (find == NULL) return missing("cuGetProcAddress");
    /* It asks the resolver for the resolver, at its own version. */
    if (find("cuGetProcAddress", &found, 11030, 0) != CUDA_SUCCESS) return missing("cuGetProcAddress at 11030");
    return by_resolver_4((resolver_4)found, api);
  }
  const resolver_5 find = (resolver_5)dlsym(library, "cuGetProcAddress_v2");
  if (find == NULL) return missing("cuGetProcAddress_v2");
  if (strcmp(way, "cudart12-for-11") == 0) {
    if (find("cuGetProcAddress", &found, 11030, 0, &status) != CUDA_SUCCESS) return missing("the shape of 11030");
    return by_resolver_4((resolver_4)found, api);
  }
  if (find("cuGetProcAddress", &found, 12000, 0, &status) != CUDA_SUCCESS) return missing("the shape of 12000");
  return by_resolver_5((resolver_5)found, strcmp(way, "per-thread") == 0, api);
}

int resolve(const char* way, struct api* api) {
  int flags = RTLD_NOW | RTLD_LOCAL;
  if (strcmp(way, "names-global") == 0 || strcmp(way, "names-default") == 0) flags = RTLD_NOW | RTLD_GLOBAL;
  if (strcmp(way, "names-deepbind") == 0) flags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
  void* library = dlopen("libcuda.so.1", flags);
  if (library == NULL) return missing(dlerror());
  if (strcmp(way, "names-default") == 0) return by_name(RTLD_DEFAULT, api);
  if (strncmp(way, "names", 5) == 0) return by_name(library, api);
  return by_cudart(way, library, api);
}
