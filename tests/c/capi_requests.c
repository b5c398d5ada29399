/* What a request says, field by field, and what came of it: reports, pending resumes, swaps, views of backups. */
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

static ebbtide_report_totals totals_of(ebbtide_report* report) {
  ebbtide_report_totals totals = {0};
  EXPECT(EBBTIDE_OK, ebbtide_read_report(report, &totals, &error));
  ebbtide_free_report(report);
  return totals;
}

/* Host memory of backups. */
static uint64_t backup_bytes(void) {
  ebbtide_stats stats = {0};
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  return stats.host_held_bytes - stats.staging_bytes;
}

static ebbtide_request of_tag(const char* const* tag) {
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = tag;
  request.tag_count = 1;
  return request;
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

struct rows {
  uint64_t count, bytes, copied, skipped;
  char tags[64];
};
static void add_row(void* user, const ebbtide_report_row* row) {
  struct rows* const rows = user;
  CHECK(row->device == 0);
  CHECK(row->skipped == row->clean + row->unused + row->constant);
  ++rows->count;
  rows->bytes += row->bytes;
  rows->copied += row->copied;
  rows->skipped += row->skipped;
  snprintf(rows->tags + strlen(rows->tags), sizeof rows->tags - strlen(rows->tags), "%s;", row->tag);
}

static void a_report_has_a_row_for_each_tag(void) {
  unsigned char *const one = take("one", NULL, 1), *const two = take("two", NULL, 2),
                       *const left = take("left", NULL, 3);
  memset(two, 0, CHUNK);
  ebbtide_report* report = NULL;
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = (const char* const[]){"two", "one", "two"};
  request.tag_count = 3;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, &report, &error));
  struct rows moved = {0}, stayed = {0};
  EXPECT(EBBTIDE_OK, ebbtide_visit_report(report, add_row, &moved, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_remaining(report, add_row, &stayed, &error));
  CHECK(moved.count == 2 && moved.bytes == 2 * CHUNK && moved.copied == CHUNK && moved.skipped == CHUNK);
  CHECK(strcmp(moved.tags, "one;two;") == 0);
  CHECK(stayed.count == 1 && stayed.bytes == CHUNK && strcmp(stayed.tags, "left;") == 0);
  const ebbtide_report_totals totals = totals_of(report);
  CHECK(totals.kind == EBBTIDE_PAUSE && totals.seconds > 0);
  CHECK(totals.sum.bytes == 2 * CHUNK && totals.sum.copied == CHUNK && totals.sum.skipped == CHUNK);
  CHECK(totals.sum.constant == CHUNK && totals.sum.clean == 0 && totals.sum.unused == 0);
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, &report, &error));
  CHECK(totals_of(report).sum.bytes == 2 * CHUNK);
  CHECK(is_filled(one, 1) && is_filled(left, 3) && two[CHUNK - 1] == 0);
  give_back(one);
  give_back(two);
  give_back(left);
}

/* --- fields ------------------------------------------------------------------------------------------------------- */

static void a_backup_for_this_once(void) {
  const ebbtide_policy none = {.backup = EBBTIDE_BACKUP_NONE};
  unsigned char *const plain = take("plain", NULL, 1), *const cache = take("cache", &none, 2);
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.backup = EBBTIDE_BACKUP_RAM;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(is_filled(plain, 1) && is_filled(cache, 2));
  request.backup = EBBTIDE_BACKUP_NONE;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(plain[0] == 0 && plain[CHUNK - 1] == 0 && cache[7] == 0);
  give_back(plain);
  give_back(cache);
}

static void retain_for_this_once(void) {
  const ebbtide_policy keeps = {.backup = EBBTIDE_BACKUP_RAM, .retain = 1};
  unsigned char *const address = take("kept", &keeps, 1), *const other = take("not", NULL, 2);
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  ebbtide_report* report = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_pause(NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(NULL, &report, &error));
  ebbtide_report_totals totals = totals_of(report);
  CHECK(totals.sum.clean == CHUNK && totals.sum.copied == CHUNK); /* the policies: one is kept */
  request.retain = 0;
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(backup_bytes() == 0);
  EXPECT(EBBTIDE_OK, ebbtide_pause(NULL, &report, &error));
  totals = totals_of(report);
  CHECK(totals.sum.clean == 0 && totals.sum.copied == 2 * CHUNK);
  request.retain = 1;
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(backup_bytes() == 2 * CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_pause(NULL, NULL, &error));
  for (const int32_t* bad = (const int32_t[]){-2, 2, INT32_MAX, INT32_MIN, 0}; *bad != 0; ++bad) {
    request.retain = *bad;
    REFUSED(ebbtide_resume(&request, NULL, &error));
    SAYS("retain");
  }
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(is_filled(address, 1) && is_filled(other, 2));
  give_back(address);
  give_back(other);
}

static uint64_t at(const void* address) { return (uint64_t)(uintptr_t)address; }

static void unused_ranges(void) {
  unsigned char* const address = take("u", NULL, 1);
  const char* const tag[] = {"u"};
  ebbtide_request request = of_tag(tag);
  ebbtide_report* report = NULL;
  request.unused_count = 1;
  REFUSED(ebbtide_pause(&request, NULL, &error)); /* and no ranges */
  SAYS("unused");
  const ebbtide_range overlapping[] = {{at(address) + MIB, MIB}, {at(address), MIB + 1}};
  const ebbtide_range wrapping[] = {{UINT64_MAX, 2}};
  const ebbtide_range side_by_side[] = {{at(address) + CHUNK, MIB}, {at(address), CHUNK}};
  request.unused = overlapping;
  request.unused_count = 2;
  REFUSED(ebbtide_pause(&request, NULL, &error));
  SAYS("overlap");
  request.unused = wrapping;
  request.unused_count = 1;
  REFUSED(ebbtide_pause(&request, NULL, &error));
  SAYS("beyond");
  CHECK(is_filled(address, 1) && ebbtide_is_away(address, 1) == 0);
  /* A tag that was leased since then: what is said of it may be true no more. */
  ebbtide_lease lease = {0};
  request.unused = side_by_side;
  request.unused_count = 2;
  request.unused_as_of = ebbtide_last_lease();
  EXPECT(EBBTIDE_OK, ebbtide_open_lease("u", "me", &lease, &error));
  EXPECT(EBBTIDE_OK, ebbtide_close_lease(lease.id, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, &report, &error));
  ebbtide_report_totals totals = totals_of(report);
  CHECK(totals.sum.unused == 0 && totals.sum.copied == CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(is_filled(address, 1));
  request.unused_as_of = ebbtide_last_lease();
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, &report, &error));
  totals = totals_of(report);
  CHECK(totals.sum.unused == CHUNK && totals.sum.copied == 0 && totals.sum.skipped == CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  give_back(address);
}

static void what_comes_first(void) {
  unsigned char* const address = take("o", NULL, 1);
  const char* const tag[] = {"o"};
  ebbtide_request request = of_tag(tag);
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  request.order_count = 1;
  REFUSED(ebbtide_resume(&request, NULL, &error));
  SAYS("order");
  request.order = (const ebbtide_range[]){{UINT64_MAX - 1, 3}};
  REFUSED(ebbtide_resume(&request, NULL, &error));
  request.order = (const ebbtide_range[]){{UINT64_MAX - 1, 1}};
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(is_filled(address, 1));
  give_back(address);
}

static void some_addresses_of_a_tag(void) {
  unsigned char *const one = take("a", NULL, 1), *const two = take("a", NULL, 2);
  const char* const tag[] = {"a"};
  ebbtide_request request = of_tag(tag);
  request.addresses = (const void* const[]){two};
  request.address_count = 1;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  CHECK(ebbtide_is_away(one, CHUNK) == 0 && ebbtide_is_away(two, CHUNK) == 1);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("a"), NULL, &error));
  request.addresses = (const void* const[]){one};
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(ebbtide_is_away(one, CHUNK) == 0 && ebbtide_is_away(two, CHUNK) == 1 && is_filled(one, 1));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("a"), NULL, &error));
  CHECK(is_filled(two, 2));
  request.address_count = 0;
  REFUSED(ebbtide_trim(&request, NULL, &error));
  SAYS("address");
  request.missing_ok = 1;
  request.tags = (const char* const[]){"nobody"};
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  request.missing_ok = 0;
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_pause(&request, NULL, &error));
  give_back(one);
  give_back(two);
}

/* --- trims, preparations, swaps ----------------------------------------------------------------------------------- */

static void trimmed_memory_is_gone_and_its_neighbour_stays(void) {
  unsigned char *const one = take("n", NULL, 1), *const two = take("n", NULL, 2);
  const char* const tag[] = {"n"};
  ebbtide_request request = of_tag(tag);
  ebbtide_report* report = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error)); /* now both may lie behind one handle */
  request.addresses = (const void* const[]){one};
  request.address_count = 1;
  EXPECT(EBBTIDE_OK, ebbtide_trim(&request, &report, &error));
  const ebbtide_report_totals totals = totals_of(report);
  CHECK(totals.kind == EBBTIDE_TRIM && totals.sum.bytes == CHUNK && totals.sum.copied == 0);
  CHECK(ebbtide_is_away(one, 1) == 1 && is_filled(two, 2));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(one[0] == 0 && one[CHUNK - 1] == 0 && is_filled(two, 2));
  give_back(one);
  give_back(two);
}

static void a_preparation_takes_the_backup_ahead(void) {
  unsigned char* const address = take("p", NULL, 1);
  ebbtide_report* report = NULL;
  CHECK(backup_bytes() == 0);
  EXPECT(EBBTIDE_OK, ebbtide_prepare(EBBTIDE_TAG("p"), &report, &error));
  const ebbtide_report_totals totals = totals_of(report);
  CHECK(totals.kind == EBBTIDE_PREPARE && totals.sum.bytes >= CHUNK && totals.sum.copied == 0);
  CHECK(backup_bytes() == CHUNK && ebbtide_is_away(address, CHUNK) == 0);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("p"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("p"), NULL, &error));
  CHECK(is_filled(address, 1));
  give_back(address);
}

static void a_swap_has_two_reports(void) {
  unsigned char *const out = take("out", NULL, 1), *const in = take("in", NULL, 2), *const more = take("in", NULL, 3);
  ebbtide_report *paused = NULL, *resumed = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("in"), NULL, &error));
  const char* const tag[] = {"in"};
  ebbtide_request returning = of_tag(tag);
  returning.retain = 1;
  EXPECT(EBBTIDE_OK, ebbtide_swap(EBBTIDE_TAG("out"), &returning, &paused, &resumed, &error));
  const ebbtide_report_totals left = totals_of(paused), came = totals_of(resumed);
  CHECK(left.kind == EBBTIDE_PAUSE && left.sum.bytes == CHUNK && left.sum.copied == CHUNK);
  CHECK(came.kind == EBBTIDE_RESUME && came.sum.bytes == 2 * CHUNK && came.sum.copied == 2 * CHUNK);
  CHECK(ebbtide_is_away(out, 1) == 1 && is_filled(in, 2) && is_filled(more, 3));
  CHECK(backup_bytes() == 3 * CHUNK); /* out's, and in's, which the returning side asked to retain */
  REFUSED(ebbtide_swap(NULL, EBBTIDE_TAG("in"), NULL, NULL, &error));
  REFUSED(ebbtide_swap(EBBTIDE_TAG("out"), NULL, NULL, NULL, &error));
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_swap(EBBTIDE_TAG("out"), EBBTIDE_TAG("nobody"), NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(is_filled(out, 1));
  give_back(out);
  give_back(in);
  give_back(more);
}

/* --- pending resumes and views ------------------------------------------------------------------------------------ */

static void count_name(void* user, const char* tag) {
  CHECK(strcmp(tag, "w") == 0);
  ++*(int*)user;
}
static int preview(ebbtide_operation_kind kind) {
  int count = 0;
  EXPECT(EBBTIDE_OK, ebbtide_preview(kind, EBBTIDE_TAG("w"), count_name, &count, &error));
  return count;
}

static void what_would_move(void) {
  unsigned char* const address = take("w", NULL, 1);
  CHECK(preview(EBBTIDE_PAUSE) == 1 && preview(EBBTIDE_RESUME) == 0 && preview(EBBTIDE_PREPARE) == 1);
  CHECK(preview(EBBTIDE_TRIM) == 1 && preview(EBBTIDE_PROMOTE) == 0 && preview(EBBTIDE_DEMOTE) == 1);
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("w"), NULL, &error));
  CHECK(preview(EBBTIDE_PAUSE) == 0 && preview(EBBTIDE_RESUME) == 1);
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_preview(EBBTIDE_PAUSE, EBBTIDE_TAG("never"), count_name, NULL, &error));
  REFUSED(ebbtide_preview(EBBTIDE_PAUSE, EBBTIDE_TAG("w"), NULL, NULL, &error));
  REFUSED(ebbtide_preview((ebbtide_operation_kind)5, NULL, count_name, NULL, &error));
  REFUSED(ebbtide_preview((ebbtide_operation_kind)8, NULL, count_name, NULL, &error)); /* the core's own */
  give_back(address);
}

static void a_pending_resume_that_is_let_go_of(void) {
  unsigned char* const address = take("w", NULL, 1);
  ebbtide_pending* pending = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("w"), NULL, &error));
  CHECK(ebbtide_is_missing(address, 1) == 1);
  EXPECT(EBBTIDE_OK, ebbtide_resume_async(EBBTIDE_TAG("w"), &pending, &error));
  CHECK(ebbtide_is_missing(address, 1) == 0);
  ebbtide_free_pending(pending);
  EXPECT(EBBTIDE_OK, ebbtide_wait_for_tags(EBBTIDE_TAG("w"), &error));
  CHECK(ebbtide_is_away(address, 1) == 0 && is_filled(address, 1));
  give_back(address);
}

static void a_pending_resume(void) {
  unsigned char* const address = take("w", NULL, 1);
  ebbtide_pending* pending = NULL;
  ebbtide_report *first = NULL, *again = NULL;
  bool is_ready = false;
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("w"), NULL, &error));
  REFUSED(ebbtide_resume_async(EBBTIDE_TAG("w"), NULL, &error));
  CHECK(ebbtide_is_away(address, 1) == 1);
  EXPECT(EBBTIDE_OK, ebbtide_resume_async(EBBTIDE_TAG("w"), &pending, &error));
  REFUSED(ebbtide_pending_ready(pending, NULL, NULL, &error));
  REFUSED(ebbtide_pending_ready(NULL, NULL, &is_ready, &error));
  REFUSED(ebbtide_pending_ready(pending, &(const ebbtide_range){UINT64_MAX, 9}, &is_ready, &error));
  CHECK(!is_ready);
  const ebbtide_range block = {at(address), CHUNK}, elsewhere = {16, 16};
  EXPECT(EBBTIDE_OK, ebbtide_pending_ready(pending, &elsewhere, &is_ready, &error));
  CHECK(is_ready == 1); /* what is not on its way is there */
  REFUSED(ebbtide_pending_stream_wait(pending, 0, NULL, NULL, 1, &error));
  REFUSED(ebbtide_pending_stream_wait(NULL, 0, NULL, &block, 1, &error));
  REFUSED(ebbtide_pending_stream_wait(pending, 0, NULL, &(const ebbtide_range){UINT64_MAX, 9}, 1, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pending_stream_wait(pending, 0, NULL, &block, 1, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pending_stream_wait(pending, 0, NULL, NULL, 0, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pending_wait(pending, &first, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pending_wait(pending, &again, &error)); /* each time it is called */
  EXPECT(EBBTIDE_OK, ebbtide_pending_wait(pending, NULL, &error));
  const ebbtide_report_totals one = totals_of(first), other = totals_of(again);
  CHECK(one.kind == EBBTIDE_RESUME && one.sum.bytes == CHUNK && one.sum.copied == CHUNK && other.sum.bytes == CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_pending_ready(pending, NULL, &is_ready, &error));
  CHECK(is_ready == 1 && is_filled(address, 1));
  EXPECT(EBBTIDE_OK, ebbtide_pending_ready(pending, &block, &is_ready, &error));
  CHECK(is_ready == 1);
  ebbtide_free_pending(pending);
  REFUSED(ebbtide_pending_wait(pending, NULL, &error));
  SAYS("pending resume");
  REFUSED(ebbtide_pending_wait(NULL, NULL, &error));
  ebbtide_free_pending(pending);
  ebbtide_free_pending(NULL);
  give_back(address);
}

static void a_view_that_is_written(void) {
  unsigned char* const address = take("v", NULL, 1);
  void* bytes = NULL;
  ebbtide_backup* backup = NULL;
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("v"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_backup_of(address, CHUNK, &bytes, &backup, &error));
  CHECK(bytes != NULL && backup != NULL && is_filled(bytes, 1));
  fill(bytes, 5);
  ebbtide_release_backup(backup);
  ebbtide_release_backup(backup); /* given back before: nothing happens */
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("v"), NULL, &error));
  CHECK(is_filled(address, 5));
  give_back(address);
}

int main(void) {
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  a_report_has_a_row_for_each_tag();
  a_backup_for_this_once();
  retain_for_this_once();
  unused_ranges();
  what_comes_first();
  some_addresses_of_a_tag();
  trimmed_memory_is_gone_and_its_neighbour_stays();
  a_preparation_takes_the_backup_ahead();
  a_swap_has_two_reports();
  what_would_move();
  a_pending_resume();
  a_pending_resume_that_is_let_go_of();
  a_view_that_is_written();
  return report_failures();
}
