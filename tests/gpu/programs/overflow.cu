// Makes one allocation of as many bytes as the argument says. Every word is written, read by another kernel, and
// checked. Built by nvcc with its defaults, and therefore with the static CUDA runtime.
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                       \
  do {                                                                    \
    cudaError_t error = (call);                                           \
    if (error != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
      return 3;                                                           \
    }                                                                     \
  } while (0)

using Word = unsigned long long;

__host__ __device__ Word value_at(Word index) { return index * 0x9E3779B97F4A7C15ull ^ (index >> 7); }

__global__ void fill(Word* words, Word count) {
  for (Word i = blockIdx.x * Word(blockDim.x) + threadIdx.x; i < count; i += Word(gridDim.x) * blockDim.x) {
    words[i] = value_at(i);
  }
}

// Counts the wrong words, and inverts every bit.
__global__ void check_and_turn(Word* words, Word count, Word turned, Word* wrong) {
  Word found = 0;
  for (Word i = blockIdx.x * Word(blockDim.x) + threadIdx.x; i < count; i += Word(gridDim.x) * blockDim.x) {
    found += words[i] != (value_at(i) ^ turned);
    words[i] = ~words[i];
  }
  if (found) atomicAdd(wrong, found);
}

int main(int count_of_arguments, char** arguments) {
  const Word size_bytes = count_of_arguments > 1 ? std::strtoull(arguments[1], nullptr, 10) : 0;
  const Word count = size_bytes / sizeof(Word);
  Word *words = nullptr, *wrong = nullptr, on_host = 0;
  CHECK(cudaMalloc(&wrong, sizeof(Word)));
  CHECK(cudaMemset(wrong, 0, sizeof(Word)));
  CHECK(cudaMalloc(&words, size_bytes));
  fill<<<1024, 256>>>(words, count);
  CHECK(cudaGetLastError());
  check_and_turn<<<1024, 256>>>(words, count, 0, wrong);
  check_and_turn<<<512, 512>>>(words, count, ~0ull, wrong);
  CHECK(cudaGetLastError());
  // A copy of the whole allocation, in both directions. The two parts meet in the middle of it.
  const Word middle = count / 3 * 2;
  Word some[64], want = value_at(middle);
  CHECK(cudaMemcpy(some, words + middle, sizeof(some), cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(words + count - 64, some, sizeof(some), cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(&on_host, words + count - 64, sizeof(Word), cudaMemcpyDeviceToHost));
  Word wrong_count = 0;
  CHECK(cudaMemcpy(&wrong_count, wrong, sizeof(Word), cudaMemcpyDeviceToHost));
  CHECK(cudaFree(words));
  CHECK(cudaFree(wrong));
  if (wrong_count != 0 || on_host != want) {
    std::fprintf(stderr, "%llu words were wrong\n", wrong_count);
    return 4;
  }
  std::puts("all is right");
  return 0;
}
