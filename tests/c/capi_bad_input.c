/* Bad input to the functions of ebbtide.h that query, limit, allocate and free, from C with no Python in the process.
 * Each returns a code and a message, and none ends the process. */
#include "api/ebbtide_settings.h"
#include "capi_check.h"

static void driver_choice(void) {
  CHECK(ebbtide_api_version() == EBBTIDE_API_VERSION);
  CHECK(strlen(ebbtide_version()) >= 5);
  CHECK(strstr(ebbtide_library_path(), "libebbtide.so") != NULL);
  CHECK(strcmp(ebbtide_driver_name(), "") == 0);
  REFUSED(ebbtide_use_driver("metal", &error));
  SAYS("metal");
  SAYS("sim");
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_use_driver("off", &error));
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("cuda", &error)); /* nothing is loaded yet */
  EXPECT(EBBTIDE_OK, ebbtide_use_driver(NULL, &error));   /* EBBTIDE_DRIVER */
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  int32_t count = 0;
  EXPECT(EBBTIDE_OK, ebbtide_device_count(&count, &error));
  CHECK(count == 1);
  CHECK(strcmp(ebbtide_driver_name(), "sim") == 0);
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_use_driver("cuda", &error));
  SAYS("already sim");
}

static void visit_capability(void* user, const char* name, bool available, const char* found, const char* advice) {
  (void)available;
  ++*(int*)user;
  CHECK(name[0] != '\0' && found[0] != '\0' && advice != NULL);
}

static void devices(void) {
  int32_t number = 0;
  REFUSED(ebbtide_device_count(NULL, &error));
  REFUSED(ebbtide_driver_version(NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_driver_version(&number, &error));
  CHECK(number == (getenv("EBBTIDE_SIM_HIP") ? 70125424 : 13000));
  ebbtide_device_info info = {0};
  REFUSED(ebbtide_query_device(0, NULL, &error));
  for (const int32_t* bad = (const int32_t[]){-1, 1, 127, 128, 1000, INT32_MAX, INT32_MIN, 0}; *bad != 0; ++bad) {
    REFUSED(ebbtide_query_device(*bad, &info, &error));
    SAYS("device");
  }
  EXPECT(EBBTIDE_OK, ebbtide_query_device(0, &info, &error));
  CHECK(info.total_bytes > 0 && info.granularity_bytes == CHUNK && info.limit_bytes == EBBTIDE_UNLIMITED);
  int visits = 0;
  REFUSED(ebbtide_visit_capabilities(0, NULL, NULL, &error));
  REFUSED(ebbtide_visit_capabilities(9, visit_capability, &visits, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_capabilities(0, visit_capability, &visits, &error));
  CHECK(visits >= 4);
}

static void a_limit_refuses(void) {
  void* address = NULL;
  EXPECT(EBBTIDE_OK, set_limit("device_limit", CHUNK));
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("w", NULL, 0, CHUNK + 1, &address, &error));
  CHECK(error.device == 0 && error.requested_bytes == 2 * CHUNK && error.free_bytes == CHUNK &&
        error.limit_bytes == CHUNK);
  SAYS("device_limit");
  if (getenv("EBBTIDE_SIM_HIP") == NULL) SAYS("(overflow: split)"); /* nothing overflows by HIP's names */
  CHECK(error.cause == EBBTIDE_CAUSE_DEVICE_LIMIT);
  EXPECT(EBBTIDE_OK, set_limit("device_limit", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("w", NULL, 0, UINT64_C(1) << 46, &address, &error));
  CHECK(error.limit_bytes == EBBTIDE_UNLIMITED && error.requested_bytes == UINT64_C(1) << 46);
  CHECK(error.cause == EBBTIDE_CAUSE_DEVICE);
  SAYS("on the device itself");
  EXPECT(EBBTIDE_INVALID_ARGUMENT, ebbtide_alloc("w", NULL, 0, 0, &address, &error));
  CHECK(error.cause == EBBTIDE_CAUSE_OTHER);
}

static void bad_tags(void) {
  void* address = NULL;
  char* long_tag = malloc(MIB + 1);
  memset(long_tag, 'x', MIB);
  long_tag[MIB] = '\0';
  char tag_256[257], wide[301];
  memset(tag_256, 'y', 256);
  tag_256[256] = '\0';
  wide[0] = 'a';
  for (int i = 0; i < 149; ++i) memcpy(wide + 1 + 2 * i, "\xC3\xBC", 3);
  const char* const bad[] = {"",     "*",        "a*b",          "a/b",
                             "a\nb", "\x01",     "\x7f",         "\xff\xfe",
                             "\xC3", "\xC0\x80", "\xED\xA0\x80", "\xF5\x80\x80\x80",
                             "\x80", long_tag,   tag_256,        wide,
                             " ",    "a ",       "\xE2\x80\x8B", "\xF4\x8F\xBF\xBF"};
  ebbtide_lease lease = {0};
  int32_t slot = -1;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    REFUSED(ebbtide_alloc(bad[i], NULL, 0, CHUNK, &address, &error));
    CHECK(strlen(error.message) < 400);
    REFUSED(ebbtide_bind_slot(bad[i], NULL, 0, &slot, &error));
    REFUSED(ebbtide_open_lease(bad[i], "me", &lease, &error));
    REFUSED(ebbtide_pause(EBBTIDE_TAG(bad[i]), NULL, &error));
  }
  /* Cut for the message, and not inside a character. */
  REFUSED(ebbtide_alloc(wide, NULL, 0, CHUNK, &address, &error));
  SAYS("\xC3\xBC...'");
  free(long_tag);
  const char* const good[] = {"\xC3\xBC\xE2\x9C\x93\xF0\x9F\x8C\x8A", "a b", "a.b c", "\xF0\x9F\x98\x80"};
  for (size_t i = 0; i < sizeof good / sizeof *good; ++i) {
    address = make(good[i]);
    ebbtide_allocation_info info = {0};
    bool found = false;
    EXPECT(EBBTIDE_OK, ebbtide_find(address, &found, &info, &error));
    CHECK(found == 1 && strcmp(info.tag, good[i]) == 0);
    EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
  }
}

static void bad_allocations(void) {
  void* address = (void*)0x5;
  REFUSED(ebbtide_alloc(NULL, NULL, 0, CHUNK, &address, &error));
  REFUSED(ebbtide_alloc("w", NULL, 0, CHUNK, NULL, &error));
  REFUSED(ebbtide_alloc("w", NULL, 0, 0, &address, &error));
  for (const int64_t* bad = (const int64_t[]){-1, -CHUNK, INT64_MIN, INT64_MAX, (INT64_C(1) << 46) + 1, 0}; *bad != 0;
       ++bad) {
    REFUSED(ebbtide_alloc("w", NULL, 0, (uint64_t)*bad, &address, &error));
    SAYS("negative");
  }
  for (const int32_t* bad = (const int32_t[]){-1, 1, 127, 128, INT32_MAX, INT32_MIN, 0}; *bad != 0; ++bad) {
    REFUSED(ebbtide_alloc("w", NULL, *bad, CHUNK, &address, &error));
  }
  for (const int32_t* bad = (const int32_t[]){-1, -2, 4, 99, INT32_MIN, 0}; *bad != 0; ++bad) {
    const ebbtide_policy policy = {.backup = *bad};
    REFUSED(ebbtide_alloc("w", &policy, 0, CHUNK, &address, &error));
    SAYS("backup");
    int32_t slot = -1;
    REFUSED(ebbtide_bind_slot("w", &policy, 0, &slot, &error));
  }
  for (const int32_t* bad = (const int32_t[]){-1, 3, INT32_MAX, 0}; *bad != 0; ++bad) {
    const ebbtide_policy policy = {.backup = EBBTIDE_BACKUP_RAM, .overflow = *bad};
    REFUSED(ebbtide_alloc("w", &policy, 0, CHUNK, &address, &error));
    SAYS("overflow");
    int32_t slot = -1;
    REFUSED(ebbtide_bind_slot("w", &policy, 0, &slot, &error));
  }
  CHECK(address == (void*)0x5); /* outputs are written on success only */
  EXPECT(EBBTIDE_OK, ebbtide_alloc("w", NULL, 0, 1, &address, &error));

  REFUSED(ebbtide_free((char*)address + 1, &error));
  REFUSED(ebbtide_free((char*)address + MIB, &error));
  REFUSED(ebbtide_free(&address, &error));
  REFUSED(ebbtide_free((void*)UINTPTR_MAX, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
  REFUSED(ebbtide_free(address, &error));
  SAYS("freed before");
}

static void bad_look_ups(void) {
  char* address = make("w");
  ebbtide_allocation_info info = {0};
  bool found = false;
  REFUSED(ebbtide_find(address, NULL, &info, &error));
  EXPECT(EBBTIDE_OK, ebbtide_find(NULL, &found, &info, &error));
  CHECK(!found && info.address == 0);
  EXPECT(EBBTIDE_OK, ebbtide_find(address + CHUNK - 1, &found, NULL, &error));
  CHECK(found == 1);
  EXPECT(EBBTIDE_OK, ebbtide_find(address + CHUNK, &found, &info, &error));
  CHECK(found == 0);
  CHECK(ebbtide_is_away(NULL, UINT64_MAX) == 0);
  CHECK(ebbtide_is_away((void*)UINTPTR_MAX, UINT64_MAX) == 0);
  CHECK(ebbtide_is_away(address, UINT64_MAX) == 0);
  char tag[4];
  bool is_away = true;
  CHECK(ebbtide_find_in_handler(address, NULL, 4, &is_away) == 0);
  CHECK(ebbtide_find_in_handler(address, tag, 4, NULL) == 0);
  CHECK(ebbtide_find_in_handler(address, tag, 0, &is_away) == 0);
  CHECK(ebbtide_find_in_handler(NULL, tag, 4, &is_away) == 0);
  CHECK(ebbtide_find_in_handler(address, tag, 4, &is_away) == 1 && strcmp(tag, "w") == 0 && is_away == 0);

  void* bytes = address;
  ebbtide_backup* backup = (ebbtide_backup*)0x10;
  REFUSED(ebbtide_backup_of(address, 1, NULL, &backup, &error));
  REFUSED(ebbtide_backup_of(address, 1, &bytes, NULL, &error));
  REFUSED(ebbtide_backup_of(&found, 1, &bytes, &backup, &error));
  REFUSED(ebbtide_backup_of(address, CHUNK + 1, &bytes, &backup, &error));
  REFUSED(ebbtide_backup_of(address + CHUNK - 1, UINT64_MAX, &bytes, &backup, &error));
  EXPECT(EBBTIDE_OK, ebbtide_backup_of(address, CHUNK, &bytes, &backup, &error));
  CHECK(bytes == NULL && backup == NULL); /* resident */
  ebbtide_release_backup(NULL);
  ebbtide_release_backup((ebbtide_backup*)0x10);
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void bad_slots(void) {
  int32_t slot = -1;
  void *allocate = NULL, *release = NULL;
  REFUSED(ebbtide_bind_slot(NULL, NULL, 0, &slot, &error));
  REFUSED(ebbtide_bind_slot("w", NULL, 0, NULL, &error));
  REFUSED(ebbtide_bind_slot("w", NULL, -1, &slot, &error));
  for (const int32_t* bad = (const int32_t[]){-1, EBBTIDE_SLOT_COUNT, INT32_MAX, INT32_MIN, 0}; *bad != 0; ++bad) {
    CHECK(ebbtide_slot_alloc(*bad, CHUNK, NULL) == NULL);
    REFUSED(ebbtide_torch_functions(*bad, &allocate, &release, &error));
  }
  CHECK(ebbtide_slot_alloc(EBBTIDE_SLOT_COUNT - 1, CHUNK, NULL) == NULL); /* never bound */
  EXPECT(EBBTIDE_OK, ebbtide_bind_slot("w", NULL, 0, &slot, &error));
  REFUSED(ebbtide_torch_functions(slot, NULL, &release, &error));
  REFUSED(ebbtide_torch_functions(slot, &allocate, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_torch_functions(slot, &allocate, &release, &error));
  void* (*torch_malloc)(ptrdiff_t, int, void*) = (void* (*)(ptrdiff_t, int, void*))allocate;
  void (*torch_free)(void*, ptrdiff_t, int, void*) = (void (*)(void*, ptrdiff_t, int, void*))release;
  CHECK(torch_malloc(0, 0, NULL) == NULL);
  CHECK(torch_malloc(-1, 0, NULL) == NULL);
  CHECK(torch_malloc(PTRDIFF_MAX, 0, NULL) == NULL);
  void* address = torch_malloc(512, 99, NULL); /* torch's device is the thread's, not the block's */
  CHECK(address != NULL);
  torch_free(address, 512, 99, NULL);
  torch_free(NULL, 0, 0, NULL);
  torch_free(&slot, 4, 0, NULL); /* logged, and nothing else */
  ebbtide_slot_free(NULL);
}

static void without_an_error_struct(void) {
  CHECK(ebbtide_alloc(NULL, NULL, 0, 1, NULL, NULL) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(ebbtide_commit(NULL, NULL, NULL) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(ebbtide_torch_functions(-1, NULL, NULL, NULL) == EBBTIDE_INVALID_ARGUMENT);
  /* A slot's allocation says why it failed, to those who ask. */
  int32_t slot = -1;
  CHECK(ebbtide_bind_slot("w", NULL, 0, &slot, &error) == EBBTIDE_OK);
  CHECK(set_limit("device_limit", 0) == EBBTIDE_OK);
  CHECK(ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, &error) == NULL);
  CHECK(error.status == EBBTIDE_OUT_OF_MEMORY && error.cause == EBBTIDE_CAUSE_DEVICE_LIMIT);
  CHECK(ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, NULL) == NULL);
  CHECK(set_limit("device_limit", EBBTIDE_UNLIMITED) == EBBTIDE_OK);
  void* placed = ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, &error);
  CHECK(placed != NULL);
  ebbtide_slot_free(placed);
  /* Used again, an error tells of the last call alone. */
  void* address = NULL;
  CHECK(set_limit("device_limit", 0) == EBBTIDE_OK);
  CHECK(ebbtide_alloc("w", NULL, 0, 1, &address, &error) == EBBTIDE_OUT_OF_MEMORY && error.requested_bytes == CHUNK);
  CHECK(set_limit("device_limit", EBBTIDE_UNLIMITED) == EBBTIDE_OK);
  CHECK(error.status == EBBTIDE_OK && error.message[0] == '\0' && error.requested_bytes == 0 && error.device == -1);
}

int main(void) {
  driver_choice();
  devices();
  a_limit_refuses();
  bad_tags();
  bad_allocations();
  bad_look_ups();
  bad_slots();
  without_an_error_struct();
  return report_failures();
}
