// Embeds blocks.ptx in the library as a string. The assembler reads the file (EBBTIDE_PTX_FILE, which CMake sets), so
// there is no generated copy of it.
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
