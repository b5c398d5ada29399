/* Bad input and wrong states of leases, captures, operations, reports and queries, from C with no Python in the
 * process. */
#include "capi_check.h"

static ebbtide_request request_of(const char* const* tags, size_t count) {
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  request.tags = tags;
  request.tag_count = count;
  return request;
}

static ebbtide_status pause_tag(const char* tag) {
  const char* const tags[] = {tag};
  const ebbtide_request request = request_of(tags, 1);
  return ebbtide_pause(&request, NULL, &error);
}

static void bad_leases_and_captures(void) {
  ebbtide_lease lease = {0};
  REFUSED(ebbtide_open_lease(NULL, "me", &lease, &error));
  REFUSED(ebbtide_open_lease("w", "me", NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_open_lease("w", NULL, &lease, &error));
  EXPECT(EBBTIDE_STATE_ERROR, pause_tag("w"));
  SAYS("an unnamed holder");
  EXPECT(EBBTIDE_OK, ebbtide_close_lease(lease.id, &error));
  REFUSED(ebbtide_close_lease(lease.id, &error));
  REFUSED(ebbtide_close_lease(UINT64_MAX, &error));

  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_end_capture(&error));
  void* address = make("w");
  EXPECT(EBBTIDE_OK, ebbtide_begin_capture(&error));
  EXPECT(EBBTIDE_STATE_ERROR, pause_tag("w"));
  SAYS("capture");
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_resume(NULL, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
  ebbtide_stats stats = {0};
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.deferred_frees == 1);
  EXPECT(EBBTIDE_OK, ebbtide_end_capture(&error));
  EXPECT(EBBTIDE_OK, ebbtide_get_stats(&stats, &error));
  CHECK(stats.deferred_frees == 0 && stats.device_bytes == 0);
}

static void count_name(void* user, const char* tag) {
  CHECK(strcmp(tag, "w") == 0);
  ++*(int*)user;
}

/* A resume of what one pause has moved: not of what was away before, nor of what an address holds by now. */
static void moved_allocations(void) {
  const char* const names[] = {"w"};
  ebbtide_paused_set* moved = NULL;
  int tags = 0;
  uint64_t pauses = 0;
  uint64_t again = 0;
  REFUSED(ebbtide_make_paused_set(NULL, &error));
  REFUSED(ebbtide_visit_paused_set(NULL, count_name, &tags, &error));
  REFUSED(ebbtide_pause_count(NULL, &pauses, &error));
  REFUSED(ebbtide_pause_count("w", NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_make_paused_set(&moved, &error));
  REFUSED(ebbtide_visit_paused_set(moved, NULL, &tags, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause_count("nobody", &pauses, &error));
  CHECK(pauses == 0);

  void* away = make("w");
  EXPECT(EBBTIDE_OK, pause_tag("w"));
  void* here = make("w");
  void* dying = make("w");
  EXPECT(EBBTIDE_OK, ebbtide_pause_count("w", &pauses, &error));
  ebbtide_request request = request_of(names, 1);
  request.paused_set = moved;
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(&request, NULL, &error)); /* moves nothing, and does not count */
  EXPECT(EBBTIDE_OK, ebbtide_pause_count("w", &again, &error));
  CHECK(again == pauses + 1);
  EXPECT(EBBTIDE_OK, ebbtide_visit_paused_set(moved, count_name, &tags, &error));
  CHECK(tags == 1);
  EXPECT(EBBTIDE_OK, ebbtide_free(dying, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(&request, NULL, &error));
  CHECK(!ebbtide_is_away(here, CHUNK) && ebbtide_is_away(away, CHUNK));
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  ebbtide_free_paused_set(moved);
  ebbtide_free_paused_set(moved); /* known no more: left alone */
  REFUSED(ebbtide_visit_paused_set(moved, count_name, &tags, &error));
  REFUSED(ebbtide_pause(&request, NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(here, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(away, &error));
}

static void visit_row(void* user, const ebbtide_report_row* row) { *(uint64_t*)user += row->bytes; }

static void bad_operations(void) {
  void* address = make("w");
  const char* const names[] = {"w", NULL};
  ebbtide_request request = request_of(NULL, 1);
  REFUSED(ebbtide_pause(&request, NULL, &error));
  request = request_of(names, 1);
  request.address_count = 1; /* and no addresses */
  REFUSED(ebbtide_resume(&request, NULL, &error));
  request = request_of(names, 2);
  REFUSED(ebbtide_pause(&request, NULL, &error));
  request = request_of(names, 1);
  for (const int32_t* bad = (const int32_t[]){-2, 4, 77, INT32_MAX, 0}; *bad != 0; ++bad) {
    request.backup = *bad;
    REFUSED(ebbtide_pause(&request, NULL, &error));
  }
  EXPECT(EBBTIDE_STATE_ERROR, pause_tag("nobody named this"));
  SAYS("'w'");
  SAYS("missing_ok");
  const char* const unknown[] = {"nobody", "w"};
  request = request_of(unknown, 2);
  request.missing_ok = 1;

  ebbtide_operation* operation = NULL;
  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  uint64_t bytes = 0;
  REFUSED(ebbtide_claim((ebbtide_operation_kind)2, &request, &operation, &error));
  REFUSED(ebbtide_claim(EBBTIDE_PAUSE, &request, NULL, &error));
  REFUSED(ebbtide_commit(NULL, &report, &error));
  REFUSED(ebbtide_abandon(NULL, &error));
  REFUSED(ebbtide_commit((ebbtide_operation*)&request, &report, &error));
  REFUSED(ebbtide_abandon((ebbtide_operation*)&request, &error));
  EXPECT(EBBTIDE_OK, ebbtide_claim(EBBTIDE_PAUSE, &request, &operation, &error));
  EXPECT(EBBTIDE_OK, ebbtide_abandon(operation, &error));
  REFUSED(ebbtide_abandon(operation, &error)); /* double abandon */
  REFUSED(ebbtide_commit(operation, &report, &error));
  EXPECT(EBBTIDE_OK, ebbtide_claim(EBBTIDE_PAUSE, &request, &operation, &error));
  EXPECT(EBBTIDE_OK, ebbtide_commit(operation, &report, &error));
  REFUSED(ebbtide_commit(operation, NULL, &error)); /* double commit */
  SAYS("given back before");

  REFUSED(ebbtide_read_report(NULL, &totals, &error));
  REFUSED(ebbtide_read_report(report, NULL, &error));
  REFUSED(ebbtide_read_report((ebbtide_report*)&request, &totals, &error));
  EXPECT(EBBTIDE_OK, ebbtide_read_report(report, &totals, &error));
  CHECK(totals.kind == EBBTIDE_PAUSE && totals.sum.bytes == CHUNK && totals.sum.copied == 0 &&
        totals.sum.skipped == CHUNK && totals.sum.constant == CHUNK &&
        totals.seconds > 0); /* nobody wrote to it: all zeros */
  REFUSED(ebbtide_visit_report(NULL, visit_row, &bytes, &error));
  REFUSED(ebbtide_visit_report(report, NULL, NULL, &error));
  REFUSED(ebbtide_visit_remaining(NULL, visit_row, &bytes, &error));
  REFUSED(ebbtide_visit_remaining((ebbtide_report*)&request, visit_row, &bytes, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_report(report, visit_row, &bytes, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_remaining(report, visit_row, &bytes, &error));
  CHECK(bytes == CHUNK);
  ebbtide_free_report(report);
  ebbtide_free_report(report);
  ebbtide_free_report(NULL);
  REFUSED(ebbtide_read_report(report, &totals, &error));

  /* Double pause, and resume of what was never paused: empty reports. */
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("w"), &report, &error));
  EXPECT(EBBTIDE_OK, ebbtide_read_report(report, &totals, &error));
  CHECK(totals.sum.bytes == 0);
  ebbtide_free_report(report);
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("w"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume(EBBTIDE_TAG("w"), &report, &error));
  EXPECT(EBBTIDE_OK, ebbtide_read_report(report, &totals, &error));
  CHECK(totals.kind == EBBTIDE_RESUME && totals.sum.bytes == 0 && totals.sum.copied == 0);
  ebbtide_free_report(report);
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_resume(EBBTIDE_TAG("nobody"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(address, &error));
}

static void visit_tag(void* user, const ebbtide_tag_info* info) {
  /* A visitor may call back. */
  ebbtide_stats stats = {0};
  CHECK(ebbtide_get_stats(&stats, NULL) == EBBTIDE_OK);
  CHECK(ebbtide_free(NULL, NULL) == EBBTIDE_OK);
  ++*(int*)user;
  CHECK(info->tag[0] != '\0' && info->state == EBBTIDE_EMPTY);
}
static void visit_allocation(void* user, const ebbtide_allocation_info* info) {
  (void)info;
  ++*(int*)user;
}
static void visit_event(void* user, const ebbtide_event* event) {
  CHECK(event->kind[0] != '\0' && event->sequence > 0);
  ++*(int*)user;
}

static void bad_queries(void) {
  int visits = 0;
  REFUSED(ebbtide_visit_tags(NULL, NULL, &error));
  REFUSED(ebbtide_visit_allocations(NULL, NULL, NULL, &error));
  REFUSED(ebbtide_visit_stretches(&visits, 1, NULL, NULL, &error));
  bool found = true;
  ebbtide_tag_info info = {0};
  REFUSED(ebbtide_query_tag(NULL, &found, &info, &error));
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_query_tag("unknown", NULL, &info, &error));
  CHECK(strstr(error.message, "no region was ever named 'unknown'; known tags: ") != NULL && info.tag == NULL);
  EXPECT(EBBTIDE_OK, ebbtide_query_tag("unknown", &found, &info, &error));
  CHECK(!found && info.tag == NULL);
  EXPECT(EBBTIDE_OK, ebbtide_query_tag("a/b", &found, NULL, &error));
  CHECK(!found);
  REFUSED(ebbtide_visit_events(0, NULL, NULL, &error));
  REFUSED(ebbtide_get_stats(NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_tags(visit_tag, &visits, &error));
  CHECK(visits > 0);
  visits = 0;
  EXPECT(EBBTIDE_OK, ebbtide_visit_allocations("unknown is empty", visit_allocation, &visits, &error));
  EXPECT(EBBTIDE_OK, ebbtide_visit_allocations(NULL, visit_allocation, &visits, &error));
  CHECK(visits == 0);
  EXPECT(EBBTIDE_OK, ebbtide_visit_events(0, visit_event, &visits, &error));
  CHECK(visits > 0);
  visits = 0;
  EXPECT(EBBTIDE_OK, ebbtide_visit_events(UINT64_MAX, visit_event, &visits, &error));
  CHECK(visits == 0);
}

int main(void) {
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  bad_leases_and_captures();
  moved_allocations();
  bad_operations();
  bad_queries();
  return report_failures();
}
