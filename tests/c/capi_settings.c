/* Limits, options and what a device says of itself: each is set and read alone, and does what its name says. */
#include <dlfcn.h>
#include <math.h>

#include "capi_check.h"
#include "sim/control.h"

enum { LIMITS = EBBTIDE_DEVICE_MARGIN + 1, OPTIONS = EBBTIDE_COPY_AHEAD + 1 };
static int is_usual(int option) { return option < EBBTIDE_COMPARE_BYTES; }

static void (*fail)(const char*, uint64_t, int, uint64_t);

static void find_controls(void) {
  char path[4096];
  snprintf(path, sizeof path, "%s", ebbtide_library_path());
  char* const name = strrchr(path, '/');
  CHECK(name != NULL);
  snprintf(name + 1, sizeof path - (size_t)(name + 1 - path), "libebbtide_sim.so");
  void* const library = dlopen(path, RTLD_NOW);
  *(void**)&fail = library != NULL ? dlsym(library, "ebbtide_sim_fail") : NULL;
  CHECK(fail != NULL);
}

static uint64_t limit_of(ebbtide_limit limit) {
  uint64_t bytes = 0;
  EXPECT(EBBTIDE_OK, ebbtide_get_limit(limit, &bytes, &error));
  return bytes;
}

static void every_limit_is_its_own(void) {
  uint64_t before[LIMITS];
  for (int limit = 0; limit < LIMITS; ++limit) before[limit] = limit_of((ebbtide_limit)limit);
  CHECK(before[EBBTIDE_DEVICE_LIMIT] == EBBTIDE_UNLIMITED && before[EBBTIDE_HOST_POOL] == 0);
  for (int limit = 0; limit < LIMITS; ++limit)
    EXPECT(EBBTIDE_OK, ebbtide_set_limit((ebbtide_limit)limit, (uint64_t)(1000 + limit), &error));
  for (int limit = 0; limit < LIMITS; ++limit) CHECK(limit_of((ebbtide_limit)limit) == (uint64_t)(1000 + limit));
  for (int limit = 0; limit < LIMITS; ++limit)
    EXPECT(EBBTIDE_OK, ebbtide_set_limit((ebbtide_limit)limit, before[limit], &error));
  for (int limit = 0; limit < LIMITS; ++limit) CHECK(limit_of((ebbtide_limit)limit) == before[limit]);
  uint64_t bytes = 0;
  REFUSED(ebbtide_set_limit((ebbtide_limit)LIMITS, 1, &error));
  SAYS("8");
  REFUSED(ebbtide_get_limit((ebbtide_limit)LIMITS, &bytes, &error));
  SAYS("8");
}

static void every_option_is_its_own(void) {
  int32_t value = 9;
  for (int option = 0; option < OPTIONS; ++option) {
    EXPECT(EBBTIDE_OK, ebbtide_get_option((ebbtide_option)option, &value, &error));
    CHECK(value == is_usual(option));
  }
  for (int option = 0; option < OPTIONS; ++option) {
    const int32_t usual = is_usual(option);
    EXPECT(EBBTIDE_OK, ebbtide_set_option((ebbtide_option)option, !usual, &error));
    for (int other = 0; other < OPTIONS; ++other) {
      EXPECT(EBBTIDE_OK, ebbtide_get_option((ebbtide_option)other, &value, &error));
      CHECK(value == (is_usual(other) != (other == option)));
    }
    EXPECT(EBBTIDE_OK, ebbtide_set_option((ebbtide_option)option, usual, &error));
  }
  for (const int32_t* bad = (const int32_t[]){-1, 2, INT32_MAX, INT32_MIN, 0}; *bad != 0; ++bad)
    REFUSED(ebbtide_set_option(EBBTIDE_SKIP_CLEAN, *bad, &error));
  REFUSED(ebbtide_set_option((ebbtide_option)OPTIONS, 1, &error));
  SAYS("6");
  REFUSED(ebbtide_get_option((ebbtide_option)-1, &value, &error));
  REFUSED(ebbtide_get_option(EBBTIDE_SKIP_CLEAN, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_option(EBBTIDE_SKIP_CLEAN, &value, &error));
  CHECK(value == 1);
}

static void the_whole_fraction(void) {
  double fraction = 0;
  EXPECT(EBBTIDE_OK, ebbtide_get_whole_fraction(&fraction, &error));
  CHECK(fraction == 0.6);
  for (const double* good = (const double[]){0.25, 1.0, 0.6, 0}; *good != 0; ++good) {
    EXPECT(EBBTIDE_OK, ebbtide_set_whole_fraction(*good, &error));
    EXPECT(EBBTIDE_OK, ebbtide_get_whole_fraction(&fraction, &error));
    CHECK(fraction == *good);
  }
  for (const double* bad = (const double[]){-0.01, 1.01, -INFINITY, INFINITY, (double)NAN, 0}; *bad != 0; ++bad)
    REFUSED(ebbtide_set_whole_fraction(*bad, &error));
  REFUSED(ebbtide_get_whole_fraction(NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_whole_fraction(&fraction, &error));
  CHECK(fraction == 0.6);
}

static ebbtide_device_info device_info(void) {
  ebbtide_device_info info = EBBTIDE_DEVICE_INFO_INIT;
  EXPECT(EBBTIDE_OK, ebbtide_query_device(0, &info, &error));
  return info;
}

static void a_device_says_what_it_has(void) {
  const ebbtide_device_info before = device_info();
  CHECK(before.struct_size == sizeof before && before.device == 0 && before.compute_capability == 0);
  CHECK(before.name[0] != '\0' && before.total_bytes >= before.free_bytes && before.held_bytes == 0);
  void* const address = make("w");
  ebbtide_device_info with = device_info();
  CHECK(with.held_bytes == CHUNK && with.free_bytes == before.free_bytes - CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, 8 * CHUNK, &error));
  with = device_info();
  CHECK(with.limit_bytes == 8 * CHUNK && with.room_bytes == 7 * CHUNK); /* of the limit, less what is held */
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, EBBTIDE_UNLIMITED, &error));
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_RESERVE, 3 * CHUNK, &error));
  with = device_info();
  CHECK(with.limit_bytes == EBBTIDE_UNLIMITED && with.room_bytes == with.free_bytes - 3 * CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_RESERVE, EBBTIDE_UNLIMITED, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
  /* A caller that was compiled against the first header: what it does not know of is not written. */
  ebbtide_device_info old = EBBTIDE_DEVICE_INFO_INIT;
  old.struct_size = offsetof(ebbtide_device_info, room_bytes);
  old.room_bytes = 77;
  EXPECT(EBBTIDE_OK, ebbtide_query_device(0, &old, &error));
  CHECK(old.struct_size == offsetof(ebbtide_device_info, room_bytes) && old.room_bytes == 77 && old.device == 0);
  --old.struct_size;
  REFUSED(ebbtide_query_device(0, &old, &error));
  SAYS("ebbtide_device_info.struct_size");
}

static void the_device_margin(void) {
  const ebbtide_device_info before = device_info();
  void* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_DEVICE_MARGIN, before.free_bytes - CHUNK, &error));
  CHECK(device_info().room_bytes == 0); /* beyond the reserve there is nothing */
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("w", NULL, 0, 2 * CHUNK, &address, &error));
  CHECK(error.requested_bytes == 2 * CHUNK && error.free_bytes == CHUNK && error.device == 0);
  SAYS("device_margin");
  EXPECT(EBBTIDE_OK, ebbtide_alloc("w", NULL, 0, CHUNK, &address, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_DEVICE_MARGIN, 0, &error));
}

static void poison(void) {
  unsigned char* const address = make("kv");
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.backup = EBBTIDE_BACKUP_NONE;
  EXPECT(EBBTIDE_OK, ebbtide_set_option(EBBTIDE_POISON, 1, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(address[0] == 0xEB && address[CHUNK - 1] == 0xEB);
  EXPECT(EBBTIDE_OK, ebbtide_set_option(EBBTIDE_POISON, 0, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(address[0] == 0 && address[CHUNK - 1] == 0);
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void the_host_pool(void) {
  ebbtide_stats stats = {.struct_size = sizeof stats};
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_HOST_POOL, 64 * MIB, &error));
  EXPECT(EBBTIDE_OK, ebbtide_fill_host_pool(0, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 64 * MIB);
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_HOST_POOL, 0, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 0);
  /* A slot that may spill fills it. */
  int32_t slot = -1;
  const ebbtide_policy spills = {sizeof spills, EBBTIDE_BACKUP_RAM, 0, EBBTIDE_OVERFLOW_SPLIT, 0};
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_HOST_POOL, 64 * MIB, &error));
  REFUSED(ebbtide_fill_host_pool(7, &error));
  EXPECT(EBBTIDE_OK, ebbtide_bind_slot("plain", NULL, 0, &slot, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 0);
  EXPECT(EBBTIDE_OK, ebbtide_bind_slot("spills", &spills, 0, &slot, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 64 * MIB);
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_HOST_POOL, 0, &error));
}

static void a_folder_of_disk_backups(void) {
  const ebbtide_policy on_disk = {sizeof on_disk, EBBTIDE_BACKUP_DISK, 0, 0, 0};
  unsigned char* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_alloc("disk", &on_disk, 0, CHUNK, (void**)&address, &error));
  for (size_t i = 0; i < CHUNK; ++i) address[i] = (unsigned char)(i * 11 + i / 256);
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_set_disk_directory("/no/such/folder", &error));
  SAYS("/no/such/folder");
  EXPECT(EBBTIDE_OK, ebbtide_set_disk_directory(NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("disk"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("disk"), NULL, &error));
  CHECK(address[CHUNK - 1] == (unsigned char)((CHUNK - 1) * 11 + (CHUNK - 1) / 256));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void errors_carry_their_numbers(void) {
  void* address = make("w");
  memset(address, 1, CHUNK);
  ((char*)address)[5] = 9;
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_HOST_LIMIT, MIB, &error));
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_pause(EBBTIDE_TAG("w"), NULL, &error));
  CHECK(error.requested_bytes > MIB && error.free_bytes <= MIB && error.limit_bytes == MIB && error.device == -1);
  CHECK(error.code == 0 && error.call[0] == '\0');
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_HOST_LIMIT, EBBTIDE_UNLIMITED, &error));
  void* other = NULL;
  fail("cuMemMap", 1, 999, 1);
  EXPECT(EBBTIDE_DRIVER_ERROR, ebbtide_alloc("w", NULL, 0, CHUNK, &other, &error));
  CHECK(error.code == 999 && strcmp(error.call, "cuMemMap") == 0 && strstr(error.arguments, "size=") != NULL);
  SAYS("cuMemMap");
  CHECK(error.requested_bytes == 0 && error.device == -1);
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void note_kind(void* user, const ebbtide_event* event) { snprintf(user, 32, "%s", event->kind); }

/* What the driver has too little for is a failed allocation and an event; another error of the driver is neither. */
static void shortages_are_counted(void) {
  ebbtide_stats before = {.struct_size = sizeof before}, after = before;
  char newest[32] = "";
  void* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&before, &error));
  fail("cuMemMap", 1, 999, 1);
  EXPECT(EBBTIDE_DRIVER_ERROR, ebbtide_alloc("w", NULL, 0, CHUNK, &address, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&after, &error));
  CHECK(after.alloc_failures == before.alloc_failures && after.device_bytes == before.device_bytes);
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("w", NULL, 0, UINT64_C(1) << 42, &address, &error));
  CHECK(error.device == 0 && error.requested_bytes == UINT64_C(1) << 42);
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&after, &error));
  CHECK(after.alloc_failures == before.alloc_failures + 1);
  EXPECT(EBBTIDE_OK, ebbtide_visit_events(0, note_kind, newest, &error));
  CHECK(strcmp(newest, "out_of_memory") == 0);
}

int main(void) {
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  find_controls();
  every_limit_is_its_own();
  every_option_is_its_own();
  the_whole_fraction();
  a_device_says_what_it_has();
  the_device_margin();
  poison();
  the_host_pool();
  a_folder_of_disk_backups();
  errors_carry_their_numbers();
  shortages_are_counted();
  return report_failures();
}
