/* A libcuda.so.1 that adds functions to the simulator: the variants for per-thread default streams under their own
 * names, and captures into an existing graph. */
#include <cuda.h>

static CUstream per_thread(CUstream stream) { return stream == NULL ? CU_STREAM_PER_THREAD : stream; }

#define EXPORT __attribute__((visibility("default"))) CUresult

EXPORT cuMemAllocAsync_ptsz(CUdeviceptr* address, size_t size, CUstream stream);
EXPORT cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, size_t size, CUmemoryPool pool, CUstream stream);
EXPORT cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream);
EXPORT cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode);
EXPORT cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph);
EXPORT cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                        const CUgraphEdgeData* edges, size_t count, CUstreamCaptureMode mode);

EXPORT cuMemAllocAsync_ptsz(CUdeviceptr* address, size_t size, CUstream stream) {
  return cuMemAllocAsync(address, size, per_thread(stream));
}
EXPORT cuMemAllocFromPoolAsync_ptsz(CUdeviceptr* address, size_t size, CUmemoryPool pool, CUstream stream) {
  return cuMemAllocFromPoolAsync(address, size, pool, per_thread(stream));
}
EXPORT cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream) { return cuMemFreeAsync(address, per_thread(stream)); }
EXPORT cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode) {
  return cuStreamBeginCapture(per_thread(stream), mode);
}
EXPORT cuStreamEndCapture_ptsz(CUstream stream, CUgraph* graph) {
  return cuStreamEndCapture(per_thread(stream), graph);
}
EXPORT cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                   const CUgraphEdgeData* edges, size_t count, CUstreamCaptureMode mode) {
  return graph == NULL || nodes != NULL || edges != NULL || count != 0 ? CUDA_ERROR_INVALID_VALUE
                                                                       : cuStreamBeginCapture(stream, mode);
}
EXPORT cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode* nodes,
                                        const CUgraphEdgeData* edges, size_t count, CUstreamCaptureMode mode) {
  return cuStreamBeginCaptureToGraph(per_thread(stream), graph, nodes, edges, count, mode);
}
