/* The exact numbers of tags, allocations, stats and events in every state that an allocation can be in. */
#include "capi_check.h"

enum { BLOCK = CHUNK };

static void fill(unsigned char* bytes, size_t size, unsigned seed) {
  for (size_t i = 0; i < size; ++i) bytes[i] = (unsigned char)(i * 7 + i / 251 + seed);
}

static void* take(const char* tag, int32_t backup, int32_t retain, int32_t overflow, uint64_t size) {
  const ebbtide_policy policy = {.backup = backup, .overflow = overflow, .retain = retain};
  void* address = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_alloc(tag, &policy, 0, size, &address, &error));
  return address;
}

/* --- tags --------------------------------------------------------------------------------------------------------- */

static void find_tag(void* user, const ebbtide_tag_info* info) {
  ebbtide_tag_info* const wanted = user;
  if (strcmp(info->tag, wanted->tag) == 0) *wanted = *info;
}

static ebbtide_tag_info tag_info(const char* tag) {
  ebbtide_tag_info info = {.tag = tag, .state = -1};
  EXPECT(EBBTIDE_OK, ebbtide_visit_tags(find_tag, &info, &error));
  return info;
}

static void check_tag(const char* tag, const ebbtide_tag_info* wanted, int line) {
  const ebbtide_tag_info got = tag_info(tag);
  const int is_right = got.state == wanted->state && got.lease_count == wanted->lease_count &&
                       got.allocation_count == wanted->allocation_count && got.size_bytes == wanted->size_bytes &&
                       got.resident_bytes == wanted->resident_bytes && got.stored_bytes == wanted->stored_bytes &&
                       got.dropped_bytes == wanted->dropped_bytes && got.trimmed_bytes == wanted->trimmed_bytes &&
                       got.retained_bytes == wanted->retained_bytes && got.host_bytes == wanted->host_bytes &&
                       got.detached_bytes == wanted->detached_bytes;
  if (is_right) return;
  ++failures;
  fprintf(stderr,
          "line %d: '%s': state %d, leases %d, count %llu, size %llu, resident %llu, stored %llu, dropped %llu, "
          "trimmed %llu, retained %llu, host %llu\n",
          line, tag, got.state, got.lease_count, (unsigned long long)got.allocation_count,
          (unsigned long long)got.size_bytes, (unsigned long long)got.resident_bytes,
          (unsigned long long)got.stored_bytes, (unsigned long long)got.dropped_bytes,
          (unsigned long long)got.trimmed_bytes, (unsigned long long)got.retained_bytes,
          (unsigned long long)got.host_bytes);
}
#define TAG_IS(tag, ...) check_tag(tag, &(const ebbtide_tag_info){__VA_ARGS__}, __LINE__)

static void a_tag_through_its_states(void) {
  ebbtide_lease lease = {0};
  EXPECT(EBBTIDE_OK, ebbtide_open_lease("t", "me", &lease, &error));
  CHECK(lease.id > 0 && lease.is_away == 0 && ebbtide_last_lease() == lease.id);
  TAG_IS("t", .state = EBBTIDE_EMPTY, .lease_count = 1);
  EXPECT(EBBTIDE_OK, ebbtide_close_lease(lease.id, &error));
  unsigned char* const kept = take("t", EBBTIDE_BACKUP_RAM, 1, 0, 2 * BLOCK);
  unsigned char* const dropped = take("t", EBBTIDE_BACKUP_NONE, 0, 0, BLOCK);
  fill(kept, 2 * BLOCK, 1);
  fill(dropped, BLOCK, 2);
  TAG_IS("t", .state = EBBTIDE_RESIDENT, .allocation_count = 2, .size_bytes = 3 * BLOCK, .resident_bytes = 3 * BLOCK);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("t"), NULL, &error));
  TAG_IS("t", .state = EBBTIDE_PAUSED, .allocation_count = 2, .size_bytes = 3 * BLOCK, .stored_bytes = 2 * BLOCK,
         .dropped_bytes = BLOCK);
  const uint64_t epoch = lease.epoch;
  EXPECT(EBBTIDE_OK, ebbtide_open_lease("t", "me", &lease, &error));
  CHECK(lease.is_away == 1 && lease.epoch > epoch);
  EXPECT(EBBTIDE_OK, ebbtide_close_lease(lease.id, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("t"), NULL, &error));
  TAG_IS("t", .state = EBBTIDE_RESIDENT, .allocation_count = 2, .size_bytes = 3 * BLOCK, .resident_bytes = 3 * BLOCK,
         .retained_bytes = 2 * BLOCK);
  ebbtide_request trim = EBBTIDE_REQUEST_INIT;
  trim.tags = (const char* const[]){"t"};
  trim.tag_count = 1;
  trim.addresses = (const void* const[]){dropped};
  trim.address_count = 1;
  EXPECT(EBBTIDE_OK, ebbtide_trim(&trim, NULL, &error));
  TAG_IS("t", .state = EBBTIDE_RESIDENT, .allocation_count = 2, .size_bytes = 3 * BLOCK, .resident_bytes = 2 * BLOCK,
         .trimmed_bytes = BLOCK, .retained_bytes = 2 * BLOCK);
  ebbtide_allocation_info info = {0};
  bool found = false;
  EXPECT(EBBTIDE_OK, ebbtide_find(dropped, &found, &info, &error));
  CHECK(found == 1 && info.is_trimmed == 1 && info.place == EBBTIDE_PLACE_DROPPED && info.resident_bytes == 0);
  EXPECT(EBBTIDE_OK, ebbtide_free(kept, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(dropped, &error));
  TAG_IS("t", .state = EBBTIDE_EMPTY);
}

/* The front of "spill", of 1 block: the rest is larger than what is allowed. */
static void demote_some(void) {
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  ebbtide_stats stats = {0};
  const char* const tags[] = {"spill"};
  CHECK(request.max_bytes == UINT64_MAX);
  request.tags = tags;
  request.tag_count = 1;
  request.max_bytes = BLOCK;
  EXPECT(EBBTIDE_OK, ebbtide_demote(&request, &report, &error));
  EXPECT(EBBTIDE_OK, ebbtide_read_report(report, &totals, &error));
  CHECK(totals.kind == EBBTIDE_DEMOTE && totals.sum.bytes == BLOCK && totals.sum.copied == BLOCK);
  ebbtide_free_report(report);
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.device_bytes == 2 * BLOCK && stats.host_bytes == BLOCK && stats.bytes_demoted == BLOCK);
  request.max_bytes = UINT64_MAX;
  EXPECT(EBBTIDE_OK, ebbtide_demote(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.device_bytes == 0 && stats.host_bytes == 3 * BLOCK && stats.bytes_demoted == 3 * BLOCK);
}

static void a_tag_that_spilled(void) {
  if (is_hip()) {
    EXPECT(EBBTIDE_STATE_ERROR, ebbtide_demote(NULL, NULL, &error));
    SAYS("overflow to the host does not work with HIP");
    return;
  }
  EXPECT(EBBTIDE_OK, set_limit("device_limit", BLOCK));
  EXPECT(EBBTIDE_OK, set_limit("reserve", 0));
  unsigned char* const split = take("spill", EBBTIDE_BACKUP_RAM, 0, EBBTIDE_OVERFLOW_SPLIT, 3 * BLOCK);
  TAG_IS("spill", .state = EBBTIDE_RESIDENT, .allocation_count = 1, .size_bytes = 3 * BLOCK,
         .resident_bytes = 3 * BLOCK, .host_bytes = 2 * BLOCK);
  ebbtide_allocation_info info = {0};
  bool found = false;
  EXPECT(EBBTIDE_OK, ebbtide_find(split + 2 * BLOCK, &found, &info, &error));
  CHECK(info.address == (uint64_t)(uintptr_t)split && info.size_bytes == 3 * BLOCK);
  CHECK(info.place == EBBTIDE_PLACE_MIXED && info.host_bytes == 2 * BLOCK && info.resident_bytes == 3 * BLOCK);
  CHECK(info.chunk_count >= 2 && info.stored_bytes == 0 && info.is_trimmed == 0);
  CHECK(strcmp(info.tag, "spill") == 0);
  ebbtide_stats stats = {0};
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.device_bytes == BLOCK && stats.host_bytes == 2 * BLOCK && stats.spills == 1);
  CHECK(stats.bytes_spilled == 2 * BLOCK && stats.bytes_promoted == 0);
  EXPECT(EBBTIDE_OK, set_limit("device_limit", EBBTIDE_UNLIMITED));
  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  EXPECT(EBBTIDE_OK, ebbtide_promote(EBBTIDE_TAG("spill"), &report, &error));
  EXPECT(EBBTIDE_OK, ebbtide_read_report(report, &totals, &error));
  CHECK(totals.kind == EBBTIDE_PROMOTE && totals.sum.bytes == 2 * BLOCK && totals.sum.copied == 2 * BLOCK);
  ebbtide_free_report(report);
  TAG_IS("spill", .state = EBBTIDE_RESIDENT, .allocation_count = 1, .size_bytes = 3 * BLOCK,
         .resident_bytes = 3 * BLOCK);
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.device_bytes == 3 * BLOCK && stats.host_bytes == 0 && stats.bytes_promoted == 2 * BLOCK);
  demote_some();
  EXPECT(EBBTIDE_OK, set_limit("reserve", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OK, ebbtide_free(split, &error));
}

/* --- allocations -------------------------------------------------------------------------------------------------- */

struct seen {
  uint64_t count, last;
  const void* addresses[8];
};
static void note(void* user, const ebbtide_allocation_info* info) {
  struct seen* const seen = user;
  CHECK(info->sequence > seen->last);
  seen->last = info->sequence;
  if (seen->count < 8) seen->addresses[seen->count] = (const void*)(uintptr_t)info->address;
  ++seen->count;
}

static void allocations_come_oldest_first(void) {
  void* const first = take("b", EBBTIDE_BACKUP_RAM, 0, 0, BLOCK);
  void* const second = take("a", EBBTIDE_BACKUP_DISK, 0, 0, 2 * BLOCK);
  void* const third = take("b", EBBTIDE_BACKUP_PINNED, 0, 0, BLOCK);
  struct seen all = {0}, of_b = {0}, of_none = {0};
  EXPECT(EBBTIDE_OK, ebbtide_visit_allocations(NULL, note, &all, &error));
  CHECK(all.count == 3 && all.addresses[0] == first && all.addresses[1] == second && all.addresses[2] == third);
  EXPECT(EBBTIDE_OK, ebbtide_visit_allocations("b", note, &of_b, &error));
  CHECK(of_b.count == 2 && of_b.addresses[0] == first && of_b.addresses[1] == third);
  EXPECT(EBBTIDE_OK, ebbtide_visit_allocations("c", note, &of_none, &error));
  CHECK(of_none.count == 0);
  ebbtide_allocation_info info = {0};
  bool found = false;
  EXPECT(EBBTIDE_OK, ebbtide_find((char*)second + 5, &found, &info, &error));
  CHECK(info.device == 0 && info.place == EBBTIDE_PLACE_DEVICE && info.backup == EBBTIDE_BACKUP_DISK);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("b"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_find(third, &found, &info, &error));
  CHECK(info.place == EBBTIDE_PLACE_STORED && info.stored_bytes == BLOCK && info.resident_bytes == 0);
  CHECK(info.backup == EBBTIDE_BACKUP_PINNED);
  CHECK(ebbtide_is_away(first, 1) == 1 && ebbtide_is_away(second, 2 * BLOCK) == 0);
  char tag[8];
  bool is_away = false;
  CHECK(ebbtide_find_in_handler(third, tag, sizeof tag, &is_away) == 1 && is_away == 1 && strcmp(tag, "b") == 0);
  for (int i = 0; i < 3; ++i) EXPECT(EBBTIDE_OK, ebbtide_free((void*[]){first, second, third}[i], &error));
}

/* --- stretches ---------------------------------------------------------------------------------------------------- */

struct stretches {
  uint64_t count;
  ebbtide_stretch rows[8];
};
static void note_stretch(void* user, const ebbtide_stretch* stretch) {
  struct stretches* const found = user;
  CHECK(stretch->size_bytes > 0 && found->count < 8);
  found->rows[found->count++] = *stretch;
}
static void stretch_is(struct stretches* found, uint64_t index, const unsigned char* address, uint64_t size_bytes,
                       ebbtide_place place, ebbtide_verdict verdict) {
  const ebbtide_stretch* const row = &found->rows[index];
  CHECK(index < found->count && row->address == (uint64_t)(uintptr_t)address && row->size_bytes == size_bytes);
  CHECK(row->place == (int32_t)place && row->verdict == (int32_t)verdict);
}

static void stretches_tell_place_and_verdict(void) {
  unsigned char* const kept = take("x", EBBTIDE_BACKUP_PINNED, 1, 0, 4 * BLOCK);
  fill(kept, 3 * BLOCK, 5); /* the last block is zeros */
  struct stretches found = {0};
  EXPECT(EBBTIDE_OK, ebbtide_visit_stretches(kept + 1, 9 * BLOCK, note_stretch, &found, &error));
  CHECK(found.count == 1);
  stretch_is(&found, 0, kept + 1, 4 * BLOCK - 1, EBBTIDE_PLACE_DEVICE, EBBTIDE_VERDICT_NONE);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("x"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("x"), NULL, &error));
  kept[BLOCK + 7] ^= 1;
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("x"), NULL, &error));
  found.count = 0;
  EXPECT(EBBTIDE_OK, ebbtide_visit_stretches(kept + 5, 4 * BLOCK - 10, note_stretch, &found, &error));
  CHECK(found.count == 4);
  stretch_is(&found, 0, kept + 5, BLOCK - 5, EBBTIDE_PLACE_STORED, EBBTIDE_VERDICT_CLEAN);
  stretch_is(&found, 1, kept + BLOCK, BLOCK, EBBTIDE_PLACE_STORED, EBBTIDE_VERDICT_CHANGED);
  stretch_is(&found, 2, kept + 2 * BLOCK, BLOCK, EBBTIDE_PLACE_STORED, EBBTIDE_VERDICT_CLEAN);
  stretch_is(&found, 3, kept + 3 * BLOCK, BLOCK - 5, EBBTIDE_PLACE_STORED, EBBTIDE_VERDICT_CONSTANT);
  found.count = 0;
  EXPECT(EBBTIDE_OK, ebbtide_visit_stretches(&found, 1, note_stretch, &found, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_stretches(kept, 0, note_stretch, &found, &error));
  CHECK(found.count == 0);
  EXPECT(EBBTIDE_OK, ebbtide_free(kept, &error));
}

/* --- stats -------------------------------------------------------------------------------------------------------- */

static void stats_count_what_happened(void) {
  ebbtide_stats before, after;
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&before, &error));
  CHECK(before.allocation_count == 0 && before.deferred_undos == 0);
  unsigned char* const pinned = take("s", EBBTIDE_BACKUP_PINNED, 1, 0, 2 * BLOCK);
  fill(pinned, BLOCK, 3); /* the other block is zeros */
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("s"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&after, &error));
  CHECK(after.allocation_count == 1 && after.device_bytes == 0 && after.stored_bytes == 2 * BLOCK);
  CHECK(after.alloc_calls == before.alloc_calls + 1 && after.pauses == before.pauses + 1);
  CHECK(after.bytes_paused == before.bytes_paused + 2 * BLOCK);
  CHECK(after.bytes_to_host == before.bytes_to_host + BLOCK);
  CHECK(after.bytes_constant == before.bytes_constant + BLOCK && after.bytes_clean == before.bytes_clean);
  CHECK(after.pinned_bytes >= BLOCK + after.staging_bytes && after.staging_bytes > 0);
  CHECK(after.host_held_bytes >= after.pinned_bytes && after.host_available_bytes > 0);
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("s"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("s"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&after, &error));
  CHECK(after.resumes == before.resumes + 1 && after.bytes_resumed == before.bytes_resumed + 2 * BLOCK);
  CHECK(after.bytes_to_device == before.bytes_to_device + BLOCK && after.bytes_clean >= before.bytes_clean + BLOCK);
  EXPECT(EBBTIDE_OK, set_limit("device_limit", BLOCK));
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_resume(EBBTIDE_TAG("s"), NULL, &error));
  void* none = NULL;
  EXPECT(EBBTIDE_OUT_OF_MEMORY, ebbtide_alloc("s", NULL, 0, 2 * BLOCK, &none, &error));
  EXPECT(EBBTIDE_OK, set_limit("device_limit", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OK, ebbtide_free(pinned, &error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&after, &error));
  CHECK(after.operation_failures == before.operation_failures + 1);
  CHECK(after.alloc_failures == before.alloc_failures + 1 && after.free_calls == before.free_calls + 1);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

struct told {
  uint64_t count, last;
  char kinds[256];
  ebbtide_event newest;
  char tags[64], detail[512];
};
static void note_event(void* user, const ebbtide_event* event) {
  struct told* const told = user;
  CHECK(event->sequence > told->last && event->unix_seconds > 1e9);
  ++told->count;
  told->last = event->sequence;
  told->newest = *event;
  snprintf(told->tags, sizeof told->tags, "%s", event->tags);
  snprintf(told->detail, sizeof told->detail, "%s", event->detail);
  strncat(told->kinds, event->kind, sizeof told->kinds - strlen(told->kinds) - 1);
  strncat(told->kinds, " ", sizeof told->kinds - strlen(told->kinds) - 1);
}

static void events_tell_of_the_newest(void) {
  struct told before = {0}, told = {0}, failed = {0};
  EXPECT(EBBTIDE_OK, ebbtide_visit_events(0, note_event, &before, &error));
  unsigned char* const address = take("e", EBBTIDE_BACKUP_RAM, 0, 0, BLOCK);
  fill(address, BLOCK, 4);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("e"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("e"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_events(before.last, note_event, &told, &error));
  CHECK(told.count == 2 && strcmp(told.kinds, "pause resume ") == 0);
  CHECK(told.newest.bytes == BLOCK && told.newest.copied == BLOCK && told.newest.seconds > 0);
  CHECK(strcmp(told.tags, "e") == 0 && told.detail[0] == '\0');
  EXPECT(EBBTIDE_OK, set_limit("host_limit", 0));
  EXPECT(EBBTIDE_STORE_ERROR, ebbtide_pause(EBBTIDE_TAG("e"), NULL, &error));
  EXPECT(EBBTIDE_OK, set_limit("host_limit", EBBTIDE_UNLIMITED));
  EXPECT(EBBTIDE_OK, ebbtide_visit_events(told.last, note_event, &failed, &error));
  CHECK(failed.count == 1 && strcmp(failed.kinds, "pause_failed ") == 0 && failed.detail[0] != '\0');
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

int main(void) {
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  a_tag_through_its_states();
  a_tag_that_spilled();
  allocations_come_oldest_first();
  stretches_tell_place_and_verdict();
  stats_count_what_happened();
  events_tell_of_the_newest();
  return report_failures();
}
