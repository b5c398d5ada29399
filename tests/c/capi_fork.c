/* Invariant 10: in a forked child every function of ebbtide.h returns a STATE_ERROR or does nothing. None hangs, and
 * the parent's state does not change. */
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

#include "capi_check.h"

/* What the parent holds at the fork. */
static struct {
  void *resident, *away;
  ebbtide_lease lease;
  ebbtide_operation* operation;
  ebbtide_report* report;
  ebbtide_pending* pending;
  ebbtide_backup* backup;
  void* bytes;
  int32_t slot;
} held;

static int visits = 0;
static void visit_capability(void* user, const char* name, bool available, const char* found, const char* advice) {
  (void)user, (void)name, (void)available, (void)found, (void)advice, ++visits;
}
static void visit_row(void* user, const ebbtide_report_row* row) { (void)user, (void)row, ++visits; }
static void visit_tag(void* user, const ebbtide_tag_info* info) { (void)user, (void)info, ++visits; }
static void visit_name(void* user, const char* name) { (void)user, (void)name, ++visits; }
static void visit_allocation(void* user, const ebbtide_allocation_info* info) { (void)user, (void)info, ++visits; }
static void visit_stretch(void* user, const ebbtide_stretch* stretch) { (void)user, (void)stretch, ++visits; }
static void visit_nothing(void* user, const ebbtide_tag_info* info) { (void)user, (void)info; }
static void visit_event(void* user, const ebbtide_event* event) { (void)user, (void)event, ++visits; }

#define FORKED(call) EXPECT(EBBTIDE_STATE_ERROR, call)

static void ask_for_the_library(void) {
  int32_t number = 0;
  ebbtide_device_info info = {0};
  CHECK(ebbtide_api_version() == EBBTIDE_API_VERSION && strcmp(ebbtide_driver_name(), "sim") == 0);
  FORKED(ebbtide_use_driver("sim", &error));
  SAYS("fork");
  FORKED(ebbtide_device_count(&number, &error));
  FORKED(ebbtide_driver_version(&number, &error));
  FORKED(ebbtide_query_device(0, &info, &error));
  FORKED(ebbtide_visit_capabilities(0, visit_capability, NULL, &error));
  FORKED(set_limit("device_limit", 1));
  FORKED(ebbtide_get_setting("device_limit", NULL, 0, NULL, &error));
  FORKED(ebbtide_fill_host_pool(0, &error));
}

static void ask_for_memory(void) {
  void *address = NULL, *allocate = NULL, *release = NULL;
  bool found = false;
  int32_t slot = 0;
  ebbtide_lease lease = {0};
  FORKED(ebbtide_alloc("w", NULL, 0, CHUNK, &address, &error));
  FORKED(ebbtide_free(held.resident, &error));
  EXPECT(EBBTIDE_OK, ebbtide_free(NULL, &error));
  FORKED(ebbtide_find(held.resident, &found, NULL, &error));
  CHECK(ebbtide_is_away(held.away, 1) == 0 && ebbtide_is_missing(held.away, 1) == 0);
  FORKED(ebbtide_bind_slot("w", NULL, 0, &slot, &error));
  CHECK(ebbtide_slot_alloc(held.slot, CHUNK, NULL) == NULL);
  ebbtide_slot_free(held.resident);
  EXPECT(EBBTIDE_OK, ebbtide_torch_functions(held.slot, &allocate, &release, &error));
  FORKED(ebbtide_open_lease("w", "me", &lease, &error));
  EXPECT(EBBTIDE_OK, ebbtide_close_lease(held.lease.id, &error));
  CHECK(ebbtide_last_lease() == 0);
  FORKED(ebbtide_begin_capture(&error));
  FORKED(ebbtide_end_capture(&error));
}

static void ask_for_operations(void) {
  const void* const addresses[] = {held.resident};
  ebbtide_request request = EBBTIDE_REQUEST_INIT;
  ebbtide_operation* operation = NULL;
  ebbtide_pending* pending = NULL;
  request.addresses = addresses;
  request.address_count = 1;
  FORKED(ebbtide_pause(NULL, NULL, &error));
  FORKED(ebbtide_resume(NULL, NULL, &error));
  FORKED(ebbtide_prepare(NULL, NULL, &error));
  FORKED(ebbtide_trim(&request, NULL, &error));
  FORKED(ebbtide_promote(NULL, NULL, &error));
  FORKED(ebbtide_demote(NULL, NULL, &error));
  FORKED(ebbtide_swap(EBBTIDE_TAG("w"), EBBTIDE_TAG("away"), NULL, NULL, &error));
  FORKED(ebbtide_resume_async(EBBTIDE_TAG("away"), &pending, &error));
  FORKED(ebbtide_claim(EBBTIDE_PAUSE, NULL, &operation, &error));
  FORKED(ebbtide_preview(EBBTIDE_PAUSE, NULL, visit_name, NULL, &error));
  FORKED(ebbtide_wait_for_tags(NULL, &error));
  FORKED(ebbtide_commit(held.operation, NULL, &error));
  FORKED(ebbtide_abandon(held.operation, &error));
}

static void ask_for_handles(void) {
  bool is_ready = false;
  void* bytes = NULL;
  ebbtide_backup* backup = NULL;
  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  FORKED(ebbtide_read_report(held.report, &totals, &error));
  FORKED(ebbtide_visit_report(held.report, visit_row, NULL, &error));
  FORKED(ebbtide_visit_remaining(held.report, visit_row, NULL, &error));
  FORKED(ebbtide_pending_stream_wait(held.pending, 0, NULL, NULL, 0, &error));
  FORKED(ebbtide_pending_ready(held.pending, NULL, &is_ready, &error));
  FORKED(ebbtide_pending_wait(held.pending, &report, &error));
  FORKED(ebbtide_backup_of(held.away, 1, &bytes, &backup, &error));
  ebbtide_free_report(held.report);
  ebbtide_free_pending(held.pending);
  ebbtide_release_backup(held.backup);
}

static void ask_what_is_there(void) {
  ebbtide_stats stats = {0};
  FORKED(ebbtide_visit_tags(visit_tag, NULL, &error));
  FORKED(ebbtide_visit_allocations(NULL, visit_allocation, NULL, &error));
  FORKED(ebbtide_visit_stretches(&stats, 1, visit_stretch, NULL, &error));
  FORKED(ebbtide_get_stats(&stats, &error));
  FORKED(ebbtide_visit_events(0, visit_event, NULL, &error));
}

static int run_child(void) {
  alarm(30); /* a lock that was held at the fork */
  ask_for_the_library();
  ask_for_memory();
  ask_for_operations();
  ask_for_handles();
  ask_what_is_there();
  CHECK(visits == 0);
  return report_failures();
}

static void hold_everything(void) {
  EXPECT(EBBTIDE_OK, ebbtide_use_driver("sim", &error));
  held.resident = make("w");
  held.away = make("away");
  void* coming = make("coming");
  memset(held.away, 7, CHUNK);
  memset(coming, 9, CHUNK);
  EXPECT(EBBTIDE_OK, ebbtide_bind_slot("slot", NULL, 0, &held.slot, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("away"), &held.report, &error));
  EXPECT(EBBTIDE_OK, ebbtide_pause(EBBTIDE_TAG("coming"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_resume_async(EBBTIDE_TAG("coming"), &held.pending, &error));
  EXPECT(EBBTIDE_OK, ebbtide_backup_of(held.away, CHUNK, &held.bytes, &held.backup, &error));
  EXPECT(EBBTIDE_OK, ebbtide_claim(EBBTIDE_PAUSE, EBBTIDE_TAG("w"), &held.operation, &error));
  held.lease = (ebbtide_lease){0};
  EXPECT(EBBTIDE_OK, ebbtide_open_lease("leased", "parent", &held.lease, &error));
}

/* All that the child was refused the parent does. */
static void go_on(void) {
  ebbtide_report_totals totals = {0};
  EXPECT(EBBTIDE_OK, ebbtide_read_report(held.report, &totals, &error));
  CHECK(totals.sum.bytes == CHUNK);
  ebbtide_free_report(held.report);
  EXPECT(EBBTIDE_OK, ebbtide_pending_wait(held.pending, NULL, &error));
  ebbtide_free_pending(held.pending);
  CHECK(((unsigned char*)held.bytes)[CHUNK - 1] == 7);
  ebbtide_release_backup(held.backup);
  EXPECT(EBBTIDE_STATE_ERROR, ebbtide_pause(EBBTIDE_TAG("leased"), NULL, &error));
  EXPECT(EBBTIDE_OK, ebbtide_close_lease(held.lease.id, &error));
  EXPECT(EBBTIDE_OK, ebbtide_commit(held.operation, NULL, &error));
  CHECK(ebbtide_is_away(held.resident, 1) == 1 && ebbtide_is_away(held.away, 1) == 1);
  EXPECT(EBBTIDE_OK, ebbtide_resume(NULL, NULL, &error));
  CHECK(((unsigned char*)held.away)[CHUNK - 1] == 7);
  EXPECT(EBBTIDE_OK, ebbtide_free(held.resident, &error));
}

/* Takes the locks that look-ups take, again and again. */
static atomic_int is_busy = 1;
static void* keep_looking(void* unused) {
  ebbtide_error own;
  bool found = false;
  ebbtide_stats stats = {0};
  while (is_busy) {
    for (int i = 0; i < 100; ++i) (void)ebbtide_find(held.away, &found, NULL, &own);
    (void)ebbtide_visit_tags(visit_nothing, NULL, &own);
    (void)ebbtide_get_stats(&stats, &own);
  }
  return unused;
}

static void fork_once(void) {
  const pid_t child = fork();
  if (child == 0) _exit(run_child());
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
  pthread_t busy[2];
  hold_everything();
  if (failures > 0) return report_failures();
  fork_once();
  for (int i = 0; i < 2; ++i) CHECK(pthread_create(&busy[i], NULL, keep_looking, NULL) == 0);
  for (int i = 0; i < 60 && failures == 0; ++i) fork_once();
  is_busy = 0;
  for (int i = 0; i < 2; ++i) pthread_join(busy[i], NULL);
  go_on();
  return report_failures();
}
