/* Host memory for what was evicted, and peaks. */
#include <sys/wait.h>
#include <unistd.h>

#include "capi_check.h"

static uint64_t peak(void) {
  ebbtide_device_info info = EBBTIDE_DEVICE_INFO_INIT;
  CHECK(ebbtide_query_device(0, &info, NULL) == EBBTIDE_OK);
  return info.peak_bytes;
}

int main(void) {
  void *memory = NULL, *other = NULL;
  CHECK(ebbtide_use_driver("sim", NULL) == EBBTIDE_OK);

  CHECK(ebbtide_take_host_memory(10000, &memory, &error) == EBBTIDE_OK && memory != NULL);
  memset(memory, 5, 10000);
  other = memory;
  CHECK(ebbtide_take_host_memory(0, &other, &error) == EBBTIDE_INVALID_ARGUMENT && other == NULL);
  CHECK(ebbtide_take_host_memory(1, NULL, &error) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(ebbtide_set_limit(EBBTIDE_HOST_LIMIT, 16384, NULL) == EBBTIDE_OK);
  CHECK(ebbtide_take_host_memory(CHUNK, &other, &error) == EBBTIDE_STORE_ERROR && other == NULL);
  CHECK(strstr(error.message, "evicted memory") != NULL && strstr(error.message, "host_limit") != NULL);
  CHECK(ebbtide_set_limit(EBBTIDE_HOST_LIMIT, EBBTIDE_UNLIMITED, NULL) == EBBTIDE_OK);

  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const int is_refused = ebbtide_take_host_memory(1, &other, NULL) == EBBTIDE_STATE_ERROR &&
                           ebbtide_give_host_memory(memory, NULL) == EBBTIDE_STATE_ERROR &&
                           ebbtide_reset_peaks(NULL) == EBBTIDE_STATE_ERROR;
    _exit(is_refused ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);

  CHECK(ebbtide_give_host_memory(memory, &error) == EBBTIDE_OK);
  CHECK(ebbtide_give_host_memory(memory, &error) == EBBTIDE_INVALID_ARGUMENT);

  CHECK(peak() == 0);
  void* allocation = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_alloc("a", NULL, 0, 3 * CHUNK, &allocation, &error));
  CHECK(peak() == 3 * CHUNK);
  CHECK(ebbtide_free(allocation, NULL) == EBBTIDE_OK);
  CHECK(peak() == 3 * CHUNK);
  CHECK(ebbtide_reset_peaks(NULL) == EBBTIDE_OK);
  CHECK(peak() == 0);
  return report_failures();
}
