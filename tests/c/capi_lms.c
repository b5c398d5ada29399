/* Host memory for what was evicted, copies, and peaks. */
#include <sys/wait.h>
#include <unistd.h>

#include "capi_check.h"

static uint64_t peak(void) {
  ebbtide_device_info info = {0};
  CHECK(ebbtide_query_device(0, &info, NULL) == EBBTIDE_OK);
  return info.peak_bytes;
}

static ebbtide_host_memory_info host_memory(void) {
  ebbtide_host_memory_info info = {0};
  EXPECT(EBBTIDE_OK, ebbtide_query_host_memory(&info, &error));
  return info;
}

static void check_copies(void) {
  int nothing = 0;
  ebbtide_copy *copy = NULL, *none = (ebbtide_copy*)&nothing;
  void *device = NULL, *host = NULL;
  double seconds = -1;
  device = make("copied");
  EXPECT(EBBTIDE_OK, ebbtide_take_host_memory(0, CHUNK, &host, &error));
  memset(host, 7, CHUNK);

  EXPECT(EBBTIDE_OK, ebbtide_begin_copy(0, device, host, CHUNK, EBBTIDE_TO_DEVICE, NULL, &copy, &error));
  CHECK(ebbtide_is_copy_done(copy) == 0);
  EXPECT(EBBTIDE_OK, ebbtide_order_after_copy(copy, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_wait_for_copy(copy, &error));
  CHECK(ebbtide_is_copy_done(copy) == 1);
  CHECK(memcmp(device, host, CHUNK) == 0);
  double waited = -1;
  EXPECT(EBBTIDE_OK, ebbtide_end_copy(copy, &seconds, &waited, &error));
  CHECK(seconds > 0 && waited >= 0);

  memset(device, 9, CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_begin_copy(0, host, device, CHUNK, EBBTIDE_TO_HOST, NULL, &copy, &error));
  EXPECT(EBBTIDE_OK, ebbtide_end_copy(copy, NULL, NULL, &error));
  CHECK(memcmp(device, host, CHUNK) == 0);

  REFUSED(ebbtide_end_copy(copy, &seconds, NULL, &error));
  REFUSED(ebbtide_wait_for_copy(copy, &error));
  REFUSED(ebbtide_order_after_copy(none, NULL, &error));
  CHECK(ebbtide_is_copy_done(none) == 0 && ebbtide_is_copy_done(NULL) == 0);
  copy = none;
  REFUSED(ebbtide_begin_copy(0, NULL, device, CHUNK, EBBTIDE_TO_HOST, NULL, &copy, &error));
  CHECK(copy == NULL);
  REFUSED(ebbtide_begin_copy(0, host, NULL, CHUNK, EBBTIDE_TO_HOST, NULL, &copy, &error));
  REFUSED(ebbtide_begin_copy(0, host, device, 0, EBBTIDE_TO_HOST, NULL, &copy, &error));
  REFUSED(ebbtide_begin_copy(0, host, device, CHUNK, 2, NULL, &copy, &error));
  REFUSED(ebbtide_begin_copy(99, host, device, CHUNK, EBBTIDE_TO_HOST, NULL, &copy, &error));
  REFUSED(ebbtide_begin_copy(0, host, device, CHUNK, EBBTIDE_TO_HOST, NULL, NULL, &error));
  EXPECT(EBBTIDE_DRIVER_ERROR, ebbtide_begin_copy(0, host, device, CHUNK, EBBTIDE_TO_HOST, &nothing, &copy, &error));
  CHECK(strstr(error.call, "EventRecord") != NULL);

  EXPECT(EBBTIDE_OK, ebbtide_begin_copy(0, host, device, CHUNK, EBBTIDE_TO_HOST, NULL, &copy, &error));
  EXPECT(EBBTIDE_OK, ebbtide_begin_capture(&error));
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_begin_copy(0, host, device, CHUNK, EBBTIDE_TO_HOST, NULL, &none, &error));
  SAYS("capture");
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_trim_host_memory(&error));
  SAYS("capture");
  CHECK(ebbtide_is_copy_done(copy) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const int is_refused =
        ebbtide_is_copy_done(copy) == 0 && ebbtide_wait_for_copy(copy, NULL) == EBBTIDE_STATE_ERROR &&
        ebbtide_order_after_copy(copy, NULL, NULL) == EBBTIDE_STATE_ERROR &&
        ebbtide_end_copy(copy, NULL, NULL, NULL) == EBBTIDE_STATE_ERROR &&
        ebbtide_begin_copy(0, host, device, CHUNK, EBBTIDE_TO_HOST, NULL, &none, NULL) == EBBTIDE_STATE_ERROR;
    _exit(is_refused ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  EXPECT(EBBTIDE_OK, ebbtide_end_capture(&error));
  EXPECT(EBBTIDE_OK, ebbtide_end_copy(copy, &seconds, NULL, &error));

  EXPECT(EBBTIDE_OK, ebbtide_give_host_memory(host, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(device, &error));
}

int main(void) {
  void *memory = NULL, *other = NULL;
  CHECK(ebbtide_use_driver("sim", NULL) == EBBTIDE_OK);

  CHECK(ebbtide_take_host_memory(0, 10000, &memory, &error) == EBBTIDE_OK && memory != NULL);
  memset(memory, 5, 10000);
  CHECK((uintptr_t)memory % 256 == 0);
  CHECK(host_memory().used_bytes == 10240 && host_memory().held_bytes >= 10240);
  CHECK(host_memory().pinned_bytes == host_memory().held_bytes);
  other = memory;
  CHECK(ebbtide_take_host_memory(0, 0, &other, &error) == EBBTIDE_INVALID_ARGUMENT && other == NULL);
  CHECK(ebbtide_take_host_memory(99, 1, &other, &error) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(ebbtide_take_host_memory(0, 1, NULL, &error) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(set_limit("host_limit", host_memory().held_bytes) == EBBTIDE_OK);
  CHECK(ebbtide_take_host_memory(0, 100 * MIB, &other, &error) == EBBTIDE_STORE_ERROR && other == NULL);
  CHECK(strstr(error.message, "evicted memory") != NULL && strstr(error.message, "host_limit") != NULL);
  CHECK(set_limit("host_limit", EBBTIDE_UNLIMITED) == EBBTIDE_OK);

  ebbtide_host_memory_info info = {0};
  REFUSED(ebbtide_query_host_memory(NULL, &error));

  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const int is_refused = ebbtide_take_host_memory(0, 1, &other, NULL) == EBBTIDE_STATE_ERROR &&
                           ebbtide_give_host_memory(memory, NULL) == EBBTIDE_STATE_ERROR &&
                           ebbtide_trim_host_memory(NULL) == EBBTIDE_STATE_ERROR &&
                           ebbtide_query_host_memory(&info, NULL) == EBBTIDE_STATE_ERROR &&
                           ebbtide_reset_peaks(NULL) == EBBTIDE_STATE_ERROR;
    _exit(is_refused ? 0 : 1);
  }
  int status = 1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);

  CHECK(ebbtide_give_host_memory(memory, &error) == EBBTIDE_OK);
  CHECK(ebbtide_give_host_memory(memory, &error) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(host_memory().used_bytes == 0 && host_memory().held_bytes > 0);

  check_copies();
  CHECK(host_memory().used_bytes == 0);
  EXPECT(EBBTIDE_OK, ebbtide_trim_host_memory(&error));
  CHECK(host_memory().held_bytes == 0 && host_memory().pinned_bytes == 0);
  ebbtide_stats stats = {0};
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.pinned_bytes == 0 && stats.host_held_bytes == 0);
  EXPECT(EBBTIDE_OK, ebbtide_reset_peaks(&error));

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
