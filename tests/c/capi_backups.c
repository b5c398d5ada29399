/* Backups through the C API: a kind for each tag, and those that are retained. */
#include "capi_check.h"

static void fill(unsigned char* bytes, unsigned seed) {
  for (size_t i = 0; i < CHUNK; ++i) bytes[i] = (unsigned char)(i * 7 + i / 251 + seed);
}
static int is_filled(const unsigned char* bytes, unsigned seed) {
  for (size_t i = 0; i < CHUNK; ++i) {
    if (bytes[i] != (unsigned char)(i * 7 + i / 251 + seed)) return 0;
  }
  return 1;
}
static unsigned char* take(const char* tag, const ebbtide_policy* policy, unsigned seed) {
  void* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_alloc(tag, policy, 0, CHUNK, &address, &error));
  fill(address, seed);
  return address;
}
static void give_back(void* address) { EXPECT(EBBTIDE_OK, ebbtide_free(address, &error)); }

static void a_backup_for_each_tag(void) {
  const ebbtide_policy none = {.backup = EBBTIDE_BACKUP_NONE};
  unsigned char *const plain = take("plain", NULL, 1), *const cache = take("cache", &none, 2),
                       *const kept = take("kept", &none, 3);
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = (const char* const[]){"plain", "cache", "kept", "cache"};
  request.tag_count = 4;
  request.backups =
      (const int32_t[]){EBBTIDE_BACKUP_NONE, EBBTIDE_BACKUP_RAM, EBBTIDE_BACKUP_AS_ALLOCATED, EBBTIDE_BACKUP_RAM};
  request.backup = EBBTIDE_BACKUP_PINNED;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(plain[0] == 0 && plain[CHUNK - 1] == 0 && is_filled(cache, 2) && is_filled(kept, 3));
  request.backups = (const int32_t[]){-1, EBBTIDE_BACKUP_RAM, -1, EBBTIDE_BACKUP_NONE};
  EXPECT(EBBTIDE_INVALID_ARGUMENT, ebbtide_pause(&request, NULL, &error));
  CHECK(strstr(error.message, "two kinds") != NULL);
  request.backups = (const int32_t[]){-1, -1, 4, -1};
  EXPECT(EBBTIDE_INVALID_ARGUMENT, ebbtide_pause(&request, NULL, &error));
  CHECK(is_filled(cache, 2) && is_filled(kept, 3));
  request.backups = NULL;
  request.backup = EBBTIDE_BACKUP_NONE;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(cache[0] == 0 && kept[CHUNK - 1] == 0);
  give_back(plain);
  give_back(cache);
  give_back(kept);
}

static void a_retained_backup(void) {
  const ebbtide_policy keeps = {.backup = EBBTIDE_BACKUP_RAM, .retain = 1};
  unsigned char *const address = take("w", &keeps, 1), *const plain = take("plain", NULL, 2);
  void *bytes = NULL, *again = NULL;
  ebbtide_backup *backup = NULL, *other = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_retained_backup_of(address, CHUNK, &bytes, &backup, &error));
  CHECK(bytes == NULL && backup == NULL);
  EXPECT(EBBTIDE_OK, ebbtide_pause(NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_retained_backup_of(address, CHUNK, &bytes, &backup, &error));
  CHECK(is_filled(bytes, 1));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_retained_backup_of(address + 5, 1, &again, &other, &error));
  CHECK(again == (unsigned char*)bytes + 5);
  ebbtide_release_backup(other);
  EXPECT(EBBTIDE_OK, ebbtide_backup_of(address, CHUNK, &again, &other, &error));
  CHECK(again == NULL && other == NULL);
  EXPECT(EBBTIDE_OK, ebbtide_retained_backup_of(plain, CHUNK, &again, &other, &error));
  CHECK(again == NULL && other == NULL);
  fill(address, 3);
  CHECK(is_filled(bytes, 1));
  EXPECT(EBBTIDE_OK, ebbtide_pause(NULL, NULL, &error));
  CHECK(is_filled(bytes, 3)); /* refreshed where it was */
  ebbtide_release_backup(backup);
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(is_filled(address, 3) && is_filled(bytes, 3));
  REFUSED(ebbtide_retained_backup_of(address, CHUNK, NULL, &backup, &error));
  REFUSED(ebbtide_retained_backup_of(address, CHUNK, &bytes, NULL, &error));
  REFUSED(ebbtide_retained_backup_of(address, CHUNK + 1, &bytes, &backup, &error));
  REFUSED(ebbtide_retained_backup_of(&bytes, 1, &bytes, &backup, &error));
  give_back(address);
  give_back(plain);
}

int main(void) {
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  a_backup_for_each_tag();
  a_retained_backup();
  return report_failures();
}
