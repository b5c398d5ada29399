/* simulated/stubs/libcuda.so: a program for the simulated device can be linked against it where there is no CUDA
 * toolkit. As the toolkit's stubs/libcuda.so it has names and no code, and is never loaded. */
#include <cuda.h>

/* cuda.h's macros make the exported symbol of a name. */
#define EBBTIDE_TEXT_OF(text) #text
#define EBBTIDE_TEXT(macro) EBBTIDE_TEXT_OF(macro)

__attribute__((visibility("default"))) CUresult ebbtide_stub(void) __asm__("cuGetProcAddress_v2");
CUresult ebbtide_stub(void) { return CUDA_ERROR_STUB_LIBRARY; }

#define EBBTIDE_ALIAS(symbol) \
  __asm__(".globl " symbol "\n.type " symbol ", %function\n.set " symbol ", cuGetProcAddress_v2");
#define EBBTIDE_FUNCTION(name, least_version, necessity) EBBTIDE_ALIAS(EBBTIDE_TEXT(name))
EBBTIDE_ALIAS("cuGetProcAddress")
EBBTIDE_ALIAS("cuCtxCreate_v2")
EBBTIDE_ALIAS("cuCtxCreate_v3")
EBBTIDE_ALIAS("cuCtxCreate_v4")
#include "driver/functions.def"
#include "sim/program_functions.def"
