/* Allocations that are away, or that came back together, from C with no Python in the process: pausing some of them by
 * address, freeing and trimming them. */
#include <sys/resource.h>

#include "capi_check.h"

enum { COUNT = 3 };

static const char* const tags[] = {"w"};

static ebbtide_request request_of(const void* const* addresses, size_t count) {
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = tags;
  request.tag_count = 1;
  request.addresses = addresses;
  request.address_count = count;
  return request;
}

static uint64_t stored_bytes(void) {
  ebbtide_stats stats = {0};
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  return stats.host_held_bytes - stats.staging_bytes;
}

static void make_all(void* made[COUNT]) {
  for (int index = 0; index < COUNT; ++index) {
    made[index] = make("w");
    for (size_t at = 0; at < CHUNK; ++at)
      ((unsigned char*)made[index])[at] = (unsigned char)(at * 7 + (at >> 12) + index);
  }
}

static int is_whole(const void* address, int index) {
  const unsigned char* const bytes = address;
  for (size_t at = 0; at < CHUNK; ++at) {
    if (bytes[at] != (unsigned char)(at * 7 + (at >> 12) + index)) return 0;
  }
  return 1;
}

static void free_all(void* made[COUNT]) {
  for (int index = 0; index < COUNT; ++index) EXPECT(EBBTIDE_OK, ebbtide_free(made[index], &error));
}

/* A resume brings neighbours back behind one handle. */
static void some_of_them_leave(void) {
  void* made[COUNT];
  make_all(made);
  const ebbtide_request all = request_of(NULL, 0);
  EXPECT(EBBTIDE_OK, ebbtide_pause(&all, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&all, NULL, &error));
  const void* const some[] = {made[1]};
  const ebbtide_request request = request_of(some, 1);
  EXPECT(EBBTIDE_OK, set_limit("device_limit", COUNT * CHUNK));
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_pause(&request, NULL, &error));
  SAYS("no room to give each a handle of its own");
  SAYS("EBBTIDE_SHARED_HANDLE");
  ebbtide_operation* operation = NULL;
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_claim(EBBTIDE_PAUSE, &request, &operation, &error));
  for (int index = 0; index < COUNT; ++index) CHECK(is_whole(made[index], index));
  EXPECT(EBBTIDE_OK, set_limit("device_limit", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  CHECK(ebbtide_is_away(made[1], CHUNK) && !ebbtide_is_away(made[0], CHUNK) && !ebbtide_is_away(made[2], CHUNK));
  CHECK(is_whole(made[0], 0) && is_whole(made[2], 2));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  for (int index = 0; index < COUNT; ++index) CHECK(is_whole(made[index], index));
  free_all(made);
}

static void what_is_freed_or_trimmed_while_it_is_away_keeps_no_backup(void) {
  void* made[COUNT];
  make_all(made);
  const ebbtide_request all = request_of(NULL, 0);
  EXPECT(EBBTIDE_OK, ebbtide_pause(&all, NULL, &error));
  CHECK(stored_bytes() == COUNT * CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_free(made[0], &error));
  CHECK(stored_bytes() == (COUNT - 1) * CHUNK);
  const void* const dead[] = {made[1]};
  const ebbtide_request request = request_of(dead, 1);
  EXPECT(EBBTIDE_OK, ebbtide_trim(&request, NULL, &error));
  CHECK(stored_bytes() == (COUNT - 2) * CHUNK);
  ebbtide_allocation_info info = {0};
  bool found = false;
  EXPECT(EBBTIDE_OK, ebbtide_find(made[1], &found, &info, &error));
  CHECK(found && info.is_trimmed && !info.is_paused && info.stored_bytes == 0);
  EXPECT(EBBTIDE_OK, ebbtide_find(made[2], &found, &info, &error));
  CHECK(found && !info.is_trimmed && info.is_paused && info.stored_bytes == CHUNK);
  EXPECT(EBBTIDE_OK, set_limit("device_limit", CHUNK));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&all, NULL, &error));
  EXPECT(EBBTIDE_OK, set_limit("device_limit", EBBTIDE_UNLIMITED));
  CHECK(is_whole(made[2], 2));
  CHECK(ebbtide_is_away(made[1], CHUNK));
  EXPECT(EBBTIDE_OK, ebbtide_free(made[1], &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(made[2], &error));
}

/* A C program does not ignore SIGXFSZ: a write beyond the limit would end it. */
static void a_limit_on_the_size_of_files_ends_nothing(void) {
  void* made[COUNT];
  make_all(made);
  struct rlimit before;
  CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const struct rlimit low = {4096, before.rlim_max};
  CHECK(setrlimit(RLIMIT_FSIZE, &low) == 0);
  ebbtide_request request = request_of(NULL, 0);
  request.backup = EBBTIDE_BACKUP_DISK;
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_pause(&request, NULL, &error));
  SAYS("ulimit -f");
  request.backup = EBBTIDE_BACKUP_RAM;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
  for (int index = 0; index < COUNT; ++index) CHECK(is_whole(made[index], index));
  free_all(made);
}

static void a_pool_beyond_the_machine_is_refused(void) {
  REFUSED(set_limit("host_pool", 100ull << 40));
  SAYS("of RAM");
  CHECK(strcmp(setting_of("host_pool"), "0") == 0);
}

int main(void) {
  some_of_them_leave();
  what_is_freed_or_trimmed_while_it_is_away_keeps_no_backup();
  a_limit_on_the_size_of_files_ends_nothing();
  a_pool_beyond_the_machine_is_refused();
  return report_failures();
}
