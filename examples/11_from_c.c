/* Allocates device memory, pauses it, and resumes it at the same address. */
#include <ebbtide.h>
#include <stdio.h>
#include <stdlib.h>

static void check(ebbtide_status status, const ebbtide_error* error) {
  if (status == EBBTIDE_OK) return;
  fprintf(stderr, "%s\n", error->message); /* says what to do */
  exit(EXIT_FAILURE);
}

static uint64_t held_bytes(void) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  ebbtide_device_info info = {0};
  check(ebbtide_query_device(0, &info, &error), &error);
  return info.held_bytes;
}

int main(void) {
  ebbtide_error error = EBBTIDE_ERROR_INIT;
  void* weights = NULL;
  check(ebbtide_alloc("weights", NULL, 0, 64 << 20, &weights, &error), &error);
  printf("%llu bytes on the device at %p\n", (unsigned long long)held_bytes(), weights);

  ebbtide_report* report = NULL;
  ebbtide_report_totals totals = {0};
  check(ebbtide_pause(EBBTIDE_TAG("weights"), &report, &error), &error);
  check(ebbtide_read_report(report, &totals, &error), &error);
  ebbtide_free_report(report);
  printf("paused: freed %llu bytes, %llu are left\n", (unsigned long long)totals.sum.bytes,
         (unsigned long long)held_bytes());

  check(ebbtide_resume(EBBTIDE_TAG("weights"), NULL, &error), &error); /* the report may be NULL */
  printf("resumed: %llu bytes at the same address\n", (unsigned long long)held_bytes());
  check(ebbtide_free(weights, &error), &error);
  return EXIT_SUCCESS;
}
