/* process ACTION: events in the life of a program that is linked against libcuda.so.1. The exit status is 0 on
 * success. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SMALL ((size_t)4 << 20)
#define LARGE ((size_t)32 << 20) /* more than the tests' limit: a part of it is on the host */

static CUdeviceptr small, large;
static char* own_path;

static int is_started(void) {
  CUcontext context = NULL;
  return cuInit(0) == CUDA_SUCCESS && cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS &&
         cuCtxSetCurrent(context) == CUDA_SUCCESS;
}

static int has_allocated(void) {
  return is_started() && cuMemAlloc(&small, SMALL) == CUDA_SUCCESS && cuMemAlloc(&large, LARGE) == CUDA_SUCCESS;
}

static int has_freed(void) { return cuMemFree(small) == CUDA_SUCCESS && cuMemFree(large) == CUDA_SUCCESS; }

static int is_intact(void) {
  unsigned value = 0xEBB71DE, found = 0;
  const CUdeviceptr end = large + LARGE - sizeof value;
  return cuMemcpyHtoD(end, &value, sizeof value) == CUDA_SUCCESS &&
         cuMemcpyDtoH(&found, end, sizeof found) == CUDA_SUCCESS && found == value;
}

/* 0 if the child ended with this status. */
static int expect_status(pid_t child, int wanted) {
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child) return 1;
  if (WIFEXITED(status) && WEXITSTATUS(status) == wanted) return 0;
  fprintf(stderr, "process: the child's status is %#x\n", (unsigned)status);
  return 1;
}

static void free_late(void) {
  if (!has_freed() || cuMemAlloc(&large, LARGE) != CUDA_SUCCESS) _exit(9);
}

static void* churn(void* unused) {
  CUcontext context = NULL;
  (void)unused;
  if (cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS || cuCtxSetCurrent(context) != CUDA_SUCCESS) return NULL;
  for (;;) {
    CUdeviceptr own = 0;
    size_t free_bytes = 0, total = 0;
    if (cuMemAlloc(&own, LARGE) == CUDA_SUCCESS) cuMemFree(own);
    cuMemGetInfo(&free_bytes, &total);
  }
  return NULL;
}

static int start_threads(void) {
  pthread_t thread;
  for (int i = 0; i < 3; ++i) {
    if (pthread_create(&thread, NULL, &churn, NULL) != 0) return 0;
  }
  usleep(20000);
  return 1;
}

static pid_t forked(void (*child)(void)) {
  const pid_t id = fork();
  if (id != 0) return id;
  alarm(30); /* a child that hangs ends with this signal */
  child();
  _exit(8);
}

static void exit_in_child(void) { exit(5); }
static void exec_in_child(void) { execl(own_path, own_path, "info", (char*)NULL); }
static void use_in_child(void) {
  CUdeviceptr address = 0;
  size_t free_bytes = 0, total = 0;
  const int is_refused = cuMemAlloc(&address, SMALL) != CUDA_SUCCESS && cuMemFree(large) != CUDA_SUCCESS &&
                         cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS;
  exit(is_refused ? 5 : 6);
}

static int fork_and(void (*child)(void), int wanted) {
  if (!has_allocated() || expect_status(forked(child), wanted) != 0) return 1;
  return is_intact() && has_freed() ? 0 : 1;
}

static int fork_beside_threads(void) {
  if (!has_allocated() || !start_threads()) return 1;
  for (int i = 0; i < 20; ++i) {
    if (expect_status(forked(&exit_in_child), 5) != 0) return 1;
    // Starting CUDA takes seconds on a GPU that many other processes use.
    if (i % 5 == 0 && expect_status(forked(&exec_in_child), 0) != 0) return 1;
  }
  return is_intact() ? 0 : 1;
}

static int vfork_and_exec(void) {
  if (!has_allocated()) return 1;
  const pid_t child = vfork();
  if (child == 0) {
    execl(own_path, own_path, "info", (char*)NULL);
    _exit(8);
  }
  return expect_status(child, 0) == 0 && is_intact() && has_freed() ? 0 : 1;
}

static int tell_info(void) {
  size_t free_bytes = 0, total = 0;
  if (!is_started() || cuMemGetInfo(&free_bytes, &total) != CUDA_SUCCESS) return 1;
  printf("%zu %zu\n", free_bytes, total);
  return 0;
}

static void* refused_as_it_is_cancelled(void* unused) {
  CUdeviceptr address = 0;
  (void)unused;
  if (!is_started()) return NULL;
  pthread_cancel(pthread_self());
  cuMemAlloc(&address, (size_t)1 << 40); /* writes a line, and a thread may be cancelled there */
  pthread_testcancel();
  return NULL;
}

static int cancel(void) {
  pthread_t thread;
  void* result = NULL;
  if (!has_allocated() || pthread_create(&thread, NULL, &refused_as_it_is_cancelled, NULL) != 0) return 1;
  return pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED && has_freed() ? 0 : 1;
}

static void allocate_in_child(void) { exit(has_allocated() && is_intact() && has_freed() && tell_info() == 0 ? 5 : 6); }

/* The parent uses NVML only, as torch and vLLM do, and leaves CUDA to its child. */
static int ask_nvml_and_fork(void) {
  unsigned long long memory[3] = {0};
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  int (*ask)(void*, void*) = NULL;
  if (library != NULL) *(void**)&ask = dlsym(library, "nvmlDeviceGetMemoryInfo");
  if (ask == NULL || ask(NULL, memory) != 0) return 1;
  printf("%llu\n", memory[0]);
  fflush(stdout);
  return expect_status(forked(&allocate_in_child), 5);
}

static int look_a_name_up(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  return library != NULL && dlsym(library, "cuMemAlloc_v2") != NULL && dlerror() == NULL ? 0 : 1;
}

int main(int count, char** words) {
  const char* action = count > 1 ? words[1] : "";
  own_path = words[0];
  if (strcmp(action, "info") == 0) return tell_info();
  if (strcmp(action, "leave") == 0) return has_allocated() ? 0 : 1;
  if (strcmp(action, "leave-at-once") == 0) _exit(has_allocated() ? 0 : 1);
  if (strcmp(action, "leave-quickly") == 0) quick_exit(has_allocated() ? 0 : 1);
  if (strcmp(action, "status") == 0) return has_allocated() ? 7 : 1;
  if (strcmp(action, "atexit") == 0) return has_allocated() && atexit(&free_late) == 0 ? 0 : 1;
  if (strcmp(action, "threads") == 0) return has_allocated() && start_threads() ? 0 : 1;
  if (strcmp(action, "fork-exit") == 0) return fork_and(&exit_in_child, 5);
  if (strcmp(action, "fork-exec") == 0) return fork_and(&exec_in_child, 0);
  if (strcmp(action, "fork-use") == 0) return fork_and(&use_in_child, 5);
  if (strcmp(action, "fork-threads") == 0) return fork_beside_threads();
  if (strcmp(action, "vfork") == 0) return vfork_and_exec();
  if (strcmp(action, "fork-nvml") == 0) return ask_nvml_and_fork();
  if (strcmp(action, "look-up") == 0) return look_a_name_up();
  if (strcmp(action, "cancel") == 0) return cancel();
  if (strcmp(action, "exec") == 0 && has_allocated()) execl(own_path, own_path, "info", (char*)NULL);
  return 1;
}
