/* Actions with captures that do not begin, or do not end normally. */
#include "steps.h"

/* The memory that a freed spill still takes: none, unless ebbtide believes that a capture is running. */
static int expect_no_capture(const struct api* api, size_t size) {
  CUdeviceptr address = 0;
  size_t before = 0, with = 0, after = 0, total = 0;
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(api->cuMemAlloc(&address, size));
  TRY(api->cuMemGetInfo(&with, &total));
  TRY(api->cuMemFree(address));
  TRY(api->cuMemGetInfo(&after, &total));
  REQUIRE(with < before && after == before);
  return 0;
}

/* A free of SIZE bytes that is deferred as long as the capture runs. */
static int expect_capture(const struct api* api, CUstream stream, size_t size) {
  CUdeviceptr address = 0;
  CUgraph graph = NULL;
  size_t before = 0, put_off = 0, after = 0, total = 0;
  TRY(api->cuMemGetInfo(&before, &total));
  TRY(api->cuMemAlloc(&address, size));
  TRY(api->cuMemFree(address));
  TRY(api->cuMemGetInfo(&put_off, &total));
  REQUIRE(put_off < before);
  TRY(api->cuStreamEndCapture(stream, &graph));
  TRY(api->cuGraphDestroy(graph));
  TRY(api->cuMemGetInfo(&after, &total));
  REQUIRE(after == before);
  return 0;
}

/* begins SIZE: a capture that fails to begin is no capture, and does not disturb the one that runs. */
int begin_captures(const struct api* api, size_t size) {
  CUstream stream = NULL, other = NULL;
  CUgraph graph = NULL;
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(api->cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  int status = expect_no_capture(api, size);
  if (status != 0) return status;
  REQUIRE(api->cuStreamBeginCapture(stream, (CUstreamCaptureMode)99) != CUDA_SUCCESS);
  if ((status = expect_no_capture(api, size)) != 0) return status;
  TRY(api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  REQUIRE(api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED) != CUDA_SUCCESS);
  REQUIRE(api->cuStreamBeginCapture(other, (CUstreamCaptureMode)99) != CUDA_SUCCESS);
  REQUIRE(api->cuStreamEndCapture(other, &graph) != CUDA_SUCCESS);
  if ((status = expect_capture(api, stream, size)) != 0) return status;
  return expect_no_capture(api, size);
}

/* two-captures SIZE: one of two captures ends, and the deferred free waits for the other. */
int end_one_of_two(const struct api* api, size_t size) {
  CUstream stream = NULL, other = NULL;
  CUgraph graph = NULL;
  TRY(api->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
  TRY(api->cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
  TRY(api->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  TRY(api->cuStreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_RELAXED));
  TRY(api->cuStreamEndCapture(stream, &graph));
  TRY(api->cuGraphDestroy(graph));
  /* A stream that is destroyed without capturing ends no capture. */
  TRY(api->cuStreamDestroy(stream));
  return expect_capture(api, other, size);
}
