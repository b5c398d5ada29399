// Embeds the offload bundle of code_objects.s in the library. The assembler includes the file
// (EBBTIDE_CODE_OBJECTS_FILE, which CMake sets), so there is no generated copy of it.
#include "kernels/blocks.h"

// The loader may map the code objects from the library's file, in which they are aligned to pages.
// clang-format off
asm(R"(
  .pushsection .rodata.ebbtide_code_objects, "a"
  .balign 4096
  .hidden ebbtide_kernels_code_objects
  .global ebbtide_kernels_code_objects
ebbtide_kernels_code_objects:
  .include ")" EBBTIDE_CODE_OBJECTS_FILE R"("
  .popsection
)");
// clang-format on

namespace ebbtide::kernels {

extern const char kCodeObjects[] asm("ebbtide_kernels_code_objects");

const void* code_objects() { return kCodeObjects; }

}  // namespace ebbtide::kernels
