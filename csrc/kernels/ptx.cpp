// blocks.ptx as a string of the library: the assembler reads the file (EBBTIDE_PTX_FILE, which CMake sets), so that no copy of it is kept.
#include "kernels/blocks.h"

// clang-format off
asm(R"(
  .pushsection .rodata
  .hidden ebbtide_kernels_ptx
  .global ebbtide_kernels_ptx
ebbtide_kernels_ptx:
  .incbin ")" EBBTIDE_PTX_FILE R"("
  .byte 0
  .popsection
)");
// clang-format on

namespace ebbtide::kernels {

extern const char kPtx[] asm("ebbtide_kernels_ptx");

const char* ptx() { return kPtx; }

}  // namespace ebbtide::kernels
