/* Settings and what a device says of itself: each is set and read alone, and does what its name says. */
#include <dlfcn.h>

#include "capi_check.h"
#include "sim/control.h"

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

struct value {
  const char *setting, *usual, *other; /* usual: "" where NULL sets it */
};
static const struct value kValues[] = {
    {"device_limit", "", "1000"},   {"host_limit", "", "1001"},      {"host_margin", NULL, "1002"},
    {"pinned_limit", "", "1003"},   {"reserve", "", "1004"},         {"host_pool", "0", "1005"},
    {"device_margin", "0", "1006"}, {"shared_handle", NULL, "1007"}, {"skip_clean", "1", "0"},
    {"skip_unused", "1", "0"},      {"skip_constant", "1", "0"},     {"poison", "0", "1"},
    {"copy_ahead", "0", "1"},
};
enum { SETTINGS = sizeof kValues / sizeof kValues[0] };

static void every_setting_is_its_own(void) {
  char before[SETTINGS][64];
  for (int each = 0; each < SETTINGS; ++each) {
    snprintf(before[each], sizeof before[each], "%s", setting_of(kValues[each].setting));
    CHECK(kValues[each].usual == NULL || strcmp(before[each], kValues[each].usual) == 0);
  }
  for (int each = 0; each < SETTINGS; ++each) {
    const char* const name = kValues[each].setting;
    EXPECT(EBBTIDE_OK, ebbtide_configure(name, kValues[each].other, &error));
    for (int other = 0; other < SETTINGS; ++other)
      CHECK(strcmp(setting_of(kValues[other].setting), other == each ? kValues[each].other : before[other]) == 0);
    EXPECT(EBBTIDE_OK, ebbtide_configure(name, before[each][0] == '\0' ? NULL : before[each], &error));
    CHECK(strcmp(setting_of(name), before[each]) == 0);
  }
}

static void bad_values_set_nothing(void) {
  for (const char* const* bad = (const char* const[]){"-1", "2", "on", "", NULL}; *bad != NULL; ++bad)
    REFUSED(ebbtide_configure("skip_clean", *bad, &error));
  REFUSED(ebbtide_configure("no_such_setting", "1", &error));
  SAYS("no_such_setting");
  CHECK(strcmp(setting_of("skip_clean"), "1") == 0);
}

static ebbtide_device_info device_info(void) {
  ebbtide_device_info info = {0};
  EXPECT(EBBTIDE_OK, ebbtide_query_device(0, &info, &error));
  return info;
}

static void a_device_says_what_it_has(void) {
  const ebbtide_device_info before = device_info();
  CHECK(before.device == 0 && before.compute_capability == 0);
  CHECK(before.name[0] != '\0' && before.total_bytes >= before.free_bytes && before.held_bytes == 0);
  void* const address = make("w");
  ebbtide_device_info with = device_info();
  CHECK(with.held_bytes == CHUNK && with.free_bytes == before.free_bytes - CHUNK);
  EXPECT(EBBTIDE_OK, set_limit("device_limit", 8 * CHUNK));
  with = device_info();
  CHECK(with.limit_bytes == 8 * CHUNK && with.room_bytes == 7 * CHUNK); /* of the limit, less what is held */
  EXPECT(EBBTIDE_OK, set_limit("device_limit", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OK, set_limit("reserve", 3 * CHUNK));
  with = device_info();
  CHECK(with.limit_bytes == EBBTIDE_UNLIMITED && with.room_bytes == with.free_bytes - 3 * CHUNK);
  EXPECT(EBBTIDE_OK, set_limit("reserve", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void the_device_margin(void) {
  const ebbtide_device_info before = device_info();
  void* address = NULL;
  EXPECT(EBBTIDE_OK, set_limit("device_margin", before.free_bytes - CHUNK));
  CHECK(device_info().room_bytes == 0); /* beyond the reserve there is nothing */
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("w", NULL, 0, 2 * CHUNK, &address, &error));
  CHECK(error.requested_bytes == 2 * CHUNK && error.free_bytes == CHUNK && error.device == 0);
  SAYS("device_margin");
  EXPECT(EBBTIDE_OK, ebbtide_alloc("w", NULL, 0, CHUNK, &address, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
  EXPECT(EBBTIDE_OK, set_limit("device_margin", 0));
}

static void poison(void) {
  unsigned char* const address = make("kv");
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.backup = EBBTIDE_BACKUP_NONE;
  EXPECT(EBBTIDE_OK, ebbtide_configure("poison", "1", &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(address[0] == 0xEB && address[CHUNK - 1] == 0xEB);
  EXPECT(EBBTIDE_OK, ebbtide_configure("poison", "0", &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(address[0] == 0 && address[CHUNK - 1] == 0);
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void the_host_pool(void) {
  ebbtide_stats stats = {0};
  EXPECT(EBBTIDE_OK, set_limit("host_pool", 64 * MIB));
  if (is_hip()) {
    EXPECT(EBBTIDE_STATE_ERROR, ebbtide_fill_host_pool(0, &error));
    EXPECT(EBBTIDE_OK, set_limit("host_pool", 0));
    EXPECT(EBBTIDE_OK, ebbtide_fill_host_pool(0, &error));
    return;
  }
  EXPECT(EBBTIDE_OK, ebbtide_fill_host_pool(0, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 64 * MIB);
  EXPECT(EBBTIDE_OK, set_limit("host_pool", 0));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 0);
  /* A slot that may spill fills it. */
  int32_t slot = -1;
  const ebbtide_policy spills = {.backup = EBBTIDE_BACKUP_RAM, .overflow = EBBTIDE_OVERFLOW_SPLIT};
  EXPECT(EBBTIDE_OK, set_limit("host_pool", 64 * MIB));
  REFUSED(ebbtide_fill_host_pool(7, &error));
  EXPECT(EBBTIDE_OK, ebbtide_bind_slot("plain", NULL, 0, &slot, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 0);
  EXPECT(EBBTIDE_OK, ebbtide_bind_slot("spills", &spills, 0, &slot, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.host_pool_bytes == 64 * MIB);
  EXPECT(EBBTIDE_OK, set_limit("host_pool", 0));
}

static void a_folder_of_disk_backups(void) {
  const ebbtide_policy on_disk = {.backup = EBBTIDE_BACKUP_DISK};
  unsigned char* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_alloc("disk", &on_disk, 0, CHUNK, (void**)&address, &error));
  for (size_t i = 0; i < CHUNK; ++i) address[i] = (unsigned char)(i * 11 + i / 256);
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_configure("disk_directory", "/no/such/folder", &error));
  SAYS("/no/such/folder");
  EXPECT(EBBTIDE_OK, ebbtide_configure("disk_directory", NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("disk"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("disk"), NULL, &error));
  CHECK(address[CHUNK - 1] == (unsigned char)((CHUNK - 1) * 11 + (CHUNK - 1) / 256));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void errors_carry_their_numbers(void) {
  void* address = make("w");
  memset(address, 1, CHUNK);
  ((char*)address)[5] = 9;
  EXPECT(EBBTIDE_OK, set_limit("host_limit", MIB));
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_pause(EBBTIDE_TAG("w"), NULL, &error));
  CHECK(error.requested_bytes > MIB && error.free_bytes <= MIB && error.limit_bytes == MIB && error.device == -1);
  CHECK(error.code == 0 && error.call[0] == '\0');
  EXPECT(EBBTIDE_OK, set_limit("host_limit", EBBTIDE_UNLIMITED));
  void* other = NULL;
  fail("cuMemMap", 1, 999, 1);
  EXPECT(EBBTIDE_DRIVER_ERROR, ebbtide_alloc("w", NULL, 0, CHUNK, &other, &error));
  CHECK(error.code == 999 && strstr(error.call, "MemMap") != NULL && strstr(error.arguments, "size=") != NULL);
  SAYS("MemMap(");
  CHECK(error.requested_bytes == 0 && error.device == -1);
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void note_kind(void* user, const ebbtide_event* event) { snprintf(user, 32, "%s", event->kind); }

/* What the driver has too little for is a failed allocation and an event; another error of the driver is neither. */
static void shortages_are_counted(void) {
  ebbtide_stats before, after;
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
  every_setting_is_its_own();
  bad_values_set_nothing();
  a_device_says_what_it_has();
  the_device_margin();
  poison();
  the_host_pool();
  a_folder_of_disk_backups();
  errors_carry_their_numbers();
  shortages_are_counted();
  return report_failures();
}
