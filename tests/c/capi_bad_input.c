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

static void visit_capability(void* user, const char* name, int available, const char* found, const char* advice) {
  ++*(int*)user;
  CHECK(name[0] != '\0' && found[0] != '\0' && (available == 0 || available == 1) && advice != NULL);
}

static void devices(void) {
  int32_t number = 0;
  REFUSED(ebbtide_device_count(NULL, &error));
  REFUSED(ebbtide_driver_version(NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_driver_version(&number, &error));
  CHECK(number == 13000);
  ebbtide_device_info info = EBBTIDE_DEVICE_INFO_INIT;
  REFUSED(ebbtide_query_device(0, NULL, &error));
  for (const int32_t* bad = (const int32_t[]){-1, 1, 127, 128, 1000, INT32_MAX, INT32_MIN, 0}; *bad != 0; ++bad) {
    REFUSED(ebbtide_query_device(*bad, &info, &error));
    SAYS("device");
  }
  CHECK(info.device == -1);
  info.struct_size = 8;
  REFUSED(ebbtide_query_device(0, &info, &error));
  SAYS("struct_size");
  info.struct_size = sizeof info + 64; /* a later version's caller */
  EXPECT(EBBTIDE_OK, ebbtide_query_device(0, &info, &error));
  CHECK(info.total_bytes > 0 && info.granularity_bytes == CHUNK && info.limit_bytes == EBBTIDE_UNLIMITED);
  int visits = 0;
  REFUSED(ebbtide_visit_capabilities(0, NULL, NULL, &error));
  REFUSED(ebbtide_visit_capabilities(9, visit_capability, &visits, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_capabilities(0, visit_capability, &visits, &error));
  CHECK(visits >= 4);
}

static void limits(void) {
  uint64_t bytes = 7;
  REFUSED(ebbtide_set_limit((ebbtide_limit)9, 1, &error));
  REFUSED(ebbtide_get_limit((ebbtide_limit)-1, &bytes, &error));
  REFUSED(ebbtide_get_limit(EBBTIDE_HOST_LIMIT, NULL, &error));
  CHECK(bytes == 7);
  for (int limit = EBBTIDE_DEVICE_LIMIT; limit <= EBBTIDE_HOST_MARGIN; ++limit) {
    uint64_t before = 0;
    EXPECT(EBBTIDE_OK, ebbtide_get_limit((ebbtide_limit)limit, &before, &error));
    EXPECT(EBBTIDE_OK, ebbtide_set_limit((ebbtide_limit)limit, 12345, &error));
    EXPECT(EBBTIDE_OK, ebbtide_get_limit((ebbtide_limit)limit, &bytes, &error));
    CHECK(bytes == 12345);
    EXPECT(EBBTIDE_OK, ebbtide_set_limit((ebbtide_limit)limit, before, &error));
  }
  void* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, CHUNK, &error));
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("w", NULL, 0, CHUNK + 1, &address, &error));
  CHECK(error.device == 0 && error.requested_bytes == 2 * CHUNK && error.free_bytes == CHUNK &&
        error.limit_bytes == CHUNK);
  SAYS("device_limit");
  SAYS("(overflow: split)");
  CHECK(error.cause == EBBTIDE_CAUSE_DEVICE_LIMIT);
  EXPECT(EBBTIDE_OK, ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, EBBTIDE_UNLIMITED, &error));
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
  ebbtide_lease lease = EBBTIDE_LEASE_INIT;
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
    ebbtide_allocation_info info = EBBTIDE_ALLOCATION_INFO_INIT;
    int found = 0;
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
    const ebbtide_policy policy = {sizeof policy, *bad, 0, 0, 0};
    REFUSED(ebbtide_alloc("w", &policy, 0, CHUNK, &address, &error));
    SAYS("backup");
    int32_t slot = -1;
    REFUSED(ebbtide_bind_slot("w", &policy, 0, &slot, &error));
  }
  for (const int32_t* bad = (const int32_t[]){-1, 2, INT32_MAX, 0}; *bad != 0; ++bad) {
    const ebbtide_policy policy = {sizeof policy, EBBTIDE_BACKUP_RAM, *bad, 0, 0};
    REFUSED(ebbtide_alloc("w", &policy, 0, CHUNK, &address, &error));
    SAYS("retain");
  }
  for (const int32_t* bad = (const int32_t[]){-1, 3, INT32_MAX, 0}; *bad != 0; ++bad) {
    const ebbtide_policy policy = {sizeof policy, EBBTIDE_BACKUP_RAM, 0, *bad, 0};
    REFUSED(ebbtide_alloc("w", &policy, 0, CHUNK, &address, &error));
    SAYS("overflow");
    int32_t slot = -1;
    REFUSED(ebbtide_bind_slot("w", &policy, 0, &slot, &error));
    const ebbtide_policy flushing = {sizeof flushing, EBBTIDE_BACKUP_RAM, 0, 0, *bad};
    REFUSED(ebbtide_alloc("w", &flushing, 0, CHUNK, &address, &error));
    SAYS("flushes_first");
  }
  const ebbtide_policy small = {4, EBBTIDE_BACKUP_RAM, 0, 0, 0};
  REFUSED(ebbtide_alloc("w", &small, 0, CHUNK, &address, &error));
  SAYS("ebbtide_policy.struct_size is 4");
  CHECK(address == (void*)0x5); /* outputs are written on success only */
  const ebbtide_policy large = {sizeof large + 40, EBBTIDE_BACKUP_RAM, 0, 0, 0};
  EXPECT(EBBTIDE_OK, ebbtide_alloc("w", &large, 0, 1, &address, &error));

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
  ebbtide_allocation_info info = EBBTIDE_ALLOCATION_INFO_INIT;
  int found = 5;
  REFUSED(ebbtide_find(address, NULL, &info, &error));
  info.struct_size = offsetof(ebbtide_allocation_info, tag) + EBBTIDE_TAG_MAX; /* the first version's, less a byte */
  REFUSED(ebbtide_find(address, &found, &info, &error));
  info.struct_size = sizeof info;
  CHECK(found == 5);
  EXPECT(EBBTIDE_OK, ebbtide_find(NULL, &found, &info, &error));
  CHECK(found == 0 && info.address == 0);
  EXPECT(EBBTIDE_OK, ebbtide_find(address + CHUNK - 1, &found, NULL, &error));
  CHECK(found == 1);
  EXPECT(EBBTIDE_OK, ebbtide_find(address + CHUNK, &found, &info, &error));
  CHECK(found == 0);
  CHECK(ebbtide_is_away(NULL, UINT64_MAX) == 0);
  CHECK(ebbtide_is_away((void*)UINTPTR_MAX, UINT64_MAX) == 0);
  CHECK(ebbtide_is_away(address, UINT64_MAX) == 0);
  char tag[4];
  int is_away = 9;
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
  /* One that is too small is not written to. */
  struct {
    size_t struct_size;
    unsigned char rest[64];
  } small = {16, {0}};
  CHECK(ebbtide_free(&small, (ebbtide_error*)&small) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(ebbtide_torch_functions(-1, NULL, NULL, (ebbtide_error*)&small) == EBBTIDE_INVALID_ARGUMENT);
  for (size_t i = 0; i < sizeof small.rest; ++i) CHECK(small.rest[i] == 0);
  /* One of the first version has all but the cause, and what lies behind it is left alone. */
  struct {
    _Alignas(ebbtide_error) unsigned char bytes[sizeof(ebbtide_error)];
  } old;
  memset(old.bytes, 0x5a, sizeof old.bytes);
  const size_t old_size = offsetof(ebbtide_error, cause);
  memcpy(old.bytes, &old_size, sizeof old_size);
  ebbtide_error* const first_version = (ebbtide_error*)(void*)old.bytes;
  CHECK(ebbtide_check_tag("", 0, first_version) == EBBTIDE_INVALID_ARGUMENT);
  CHECK(first_version->struct_size == old_size && first_version->status == EBBTIDE_INVALID_ARGUMENT);
  CHECK(strstr(first_version->message, "must not be empty") != NULL);
  for (size_t i = old_size; i < sizeof old.bytes; ++i) CHECK(old.bytes[i] == 0x5a);
  /* A slot's allocation says why it failed, to those who ask. */
  int32_t slot = -1;
  CHECK(ebbtide_bind_slot("w", NULL, 0, &slot, &error) == EBBTIDE_OK);
  CHECK(ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, 0, NULL) == EBBTIDE_OK);
  CHECK(ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, &error) == NULL);
  CHECK(error.status == EBBTIDE_OUT_OF_MEMORY && error.cause == EBBTIDE_CAUSE_DEVICE_LIMIT);
  CHECK(ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, NULL) == NULL);
  CHECK(ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, (ebbtide_error*)&small) == NULL);
  for (size_t i = 0; i < sizeof small.rest; ++i) CHECK(small.rest[i] == 0);
  CHECK(ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, EBBTIDE_UNLIMITED, NULL) == EBBTIDE_OK);
  void* placed = ebbtide_slot_alloc_or_error(slot, CHUNK, NULL, &error);
  CHECK(placed != NULL);
  ebbtide_slot_free(placed);
  /* Used again, an error tells of the last call alone. */
  void* address = NULL;
  CHECK(ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, 0, &error) == EBBTIDE_OK);
  CHECK(ebbtide_alloc("w", NULL, 0, 1, &address, &error) == EBBTIDE_OUT_OF_MEMORY && error.requested_bytes == CHUNK);
  CHECK(ebbtide_set_limit(EBBTIDE_DEVICE_LIMIT, EBBTIDE_UNLIMITED, &error) == EBBTIDE_OK);
  CHECK(error.status == EBBTIDE_OK && error.message[0] == '\0' && error.requested_bytes == 0 && error.device == -1);
}

int main(void) {
  driver_choice();
  devices();
  limits();
  bad_tags();
  bad_allocations();
  bad_look_ups();
  bad_slots();
  without_an_error_struct();
  return report_failures();
}
