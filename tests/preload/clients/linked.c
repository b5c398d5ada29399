/* A client that is linked against libcuda.so.1. */
#include "api.h"

int resolve(const char* way, struct api* api) {
  (void)way;
#define TAKE(name, version, per_thread_version) api->name = &name;
  EVERY_FUNCTION(TAKE)
#undef TAKE
  return 0;
}
