/* A whole cycle in C11: allocate, write, pause, view the stored bytes, resume, free; in one call and in two phases, and
 * with memory that has no backup. */
#include <stdio.h>
#include <string.h>

#include "api/ebbtide.h"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, error.message); \
      return 1;                                                                          \
    }                                                                                    \
  } while (0)

enum { CHUNK = 2 << 20 };

static void find_tag(void* user, const ebbtide_tag_info* info) {
  ebbtide_tag_info* wanted = user;
  if (strcmp(info->tag, wanted->tag) == 0) *wanted = *info;
}

static int state_of(const char* tag) {
  ebbtide_tag_info info = {.tag = tag, .state = -1};
  ebbtide_tag_info one = {0};
  bool found = false;
  if (ebbtide_visit_tags(find_tag, &info, NULL) != EBBTIDE_OK) return -1;
  if (ebbtide_query_tag(tag, &found, &one, NULL) != EBBTIDE_OK || found != 1) return -1;
  return one.state == info.state && one.stored_bytes == info.stored_bytes && strcmp(one.tag, tag) == 0 ? info.state
                                                                                                       : -1;
}

static void fill(unsigned char* bytes, unsigned seed) {
  for (size_t i = 0; i < CHUNK; ++i) bytes[i] = (unsigned char)(i * 7 + i / 251 + seed);
}

static int is_filled(const unsigned char* bytes, unsigned seed) {
  for (size_t i = 0; i < CHUNK; ++i) {
    if (bytes[i] != (unsigned char)(i * 7 + i / 251 + seed)) return 0;
  }
  return 1;
}

int main(void) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  const ebbtide_policy dropped = {.backup = EBBTIDE_BACKUP_NONE};
  void *weights = NULL, *cache = NULL;
  CHECK(ebbtide_use_driver("sim", &error) == EBBTIDE_OK);
  CHECK(ebbtide_alloc("weights", NULL, 0, CHUNK - 5, &weights, &error) == EBBTIDE_OK);
  CHECK(ebbtide_alloc("cache", &dropped, 0, CHUNK, &cache, &error) == EBBTIDE_OK);
  CHECK(state_of("weights") == EBBTIDE_RESIDENT);
  CHECK(((unsigned char*)weights)[CHUNK - 1] == 0); /* rounded up, and zeroed */
  fill(weights, 1);
  fill(cache, 2);

  /* The C driver stands for a device: its memory is reached through the address. */
  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  CHECK(ebbtide_pause(NULL, &report, &error) == EBBTIDE_OK);
  CHECK(ebbtide_read_report(report, &totals, &error) == EBBTIDE_OK);
  CHECK(totals.sum.bytes == 2 * CHUNK && totals.sum.copied == CHUNK);
  ebbtide_free_report(report);
  CHECK(state_of("weights") == EBBTIDE_PAUSED && state_of("cache") == EBBTIDE_PAUSED);
  CHECK(ebbtide_is_away(weights, 1) == 1 && ebbtide_is_away(cache, CHUNK) == 1);

  void* bytes = NULL;
  ebbtide_backup* backup = NULL;
  CHECK(ebbtide_backup_of((char*)weights + 4096, CHUNK - 4096, &bytes, &backup, &error) == EBBTIDE_OK);
  CHECK(backup != NULL && is_filled((const unsigned char*)bytes - 4096, 1));
  ebbtide_backup* nothing = NULL;
  void* no_bytes = weights;
  CHECK(ebbtide_backup_of(cache, CHUNK, &no_bytes, &nothing, &error) == EBBTIDE_OK && no_bytes == NULL &&
        nothing == NULL);

  ebbtide_operation* operation = NULL;
  CHECK(ebbtide_claim(EBBTIDE_RESUME, EBBTIDE_TAG("weights"), &operation, &error) == EBBTIDE_OK);
  CHECK(ebbtide_abandon(operation, &error) == EBBTIDE_OK && state_of("weights") == EBBTIDE_PAUSED);
  CHECK(ebbtide_claim(EBBTIDE_RESUME, EBBTIDE_TAG("weights"), &operation, &error) == EBBTIDE_OK);
  CHECK(ebbtide_commit(operation, NULL, &error) == EBBTIDE_OK);
  CHECK(state_of("weights") == EBBTIDE_RESIDENT && state_of("cache") == EBBTIDE_PAUSED);
  CHECK(is_filled(weights, 1));
  fill(weights, 3);
  CHECK(is_filled((const unsigned char*)bytes - 4096, 1)); /* what is looked at stays as it was stored */
  CHECK(ebbtide_pause(NULL, NULL, &error) == EBBTIDE_OK);
  CHECK(is_filled((const unsigned char*)bytes - 4096, 1)); /* also when the memory leaves again */
  ebbtide_stats stats = {0};
  CHECK(ebbtide_get_stats(&stats, &error) == EBBTIDE_OK);
  CHECK(stats.stored_bytes == CHUNK && stats.host_held_bytes == 2 * CHUNK + stats.staging_bytes);
  ebbtide_release_backup(backup);
  CHECK(ebbtide_get_stats(&stats, &error) == EBBTIDE_OK && stats.host_held_bytes == CHUNK + stats.staging_bytes);

  CHECK(ebbtide_resume(NULL, NULL, &error) == EBBTIDE_OK);
  CHECK(is_filled(weights, 3));
  for (size_t i = 0; i < CHUNK; ++i) CHECK(((unsigned char*)cache)[i] == 0); /* never old bytes */
  CHECK(ebbtide_free(weights, &error) == EBBTIDE_OK);
  CHECK(ebbtide_free(cache, &error) == EBBTIDE_OK);
  CHECK(state_of("weights") == EBBTIDE_EMPTY);
  CHECK(ebbtide_get_stats(&stats, &error) == EBBTIDE_OK);
  CHECK(stats.allocation_count == 0 && stats.device_bytes == 0 && stats.host_held_bytes == stats.staging_bytes);
  CHECK(stats.alloc_calls == 2 && stats.free_calls == 2 && stats.pauses == 2 && stats.resumes == 2);

  /* The last thing that a program does may be a pause. */
  CHECK(ebbtide_alloc("weights", NULL, 0, CHUNK, &weights, &error) == EBBTIDE_OK);
  CHECK(ebbtide_pause(NULL, NULL, &error) == EBBTIDE_OK);
  return 0;
}
