#include <dlfcn.h>

#include <atomic>

#include "preload/resolver.h"

// The hook of dlsym.
//
// The real dlsym looks at its return address: RTLD_NEXT, RTLD_DEFAULT and a caller's own RUNPATH depend on the caller.
// So the hook must jump to it with the caller's frame unchanged. It can't see the real answer, and decides before the
// jump. It is written in assembly, since no compiler promises a tail call at -O0.
namespace ebbtide::preload {
namespace {

#if defined(__aarch64__)
constexpr const char* kVersions[] = {"GLIBC_2.34", "GLIBC_2.17"};
#else
constexpr const char* kVersions[] = {"GLIBC_2.34", "GLIBC_2.2.5"};
#endif

// Symbols of the linker that mark the begin and the end of this library.
extern "C" __attribute__((visibility("hidden"))) const char kLibraryStart[] asm("__ehdr_start");
extern "C" __attribute__((visibility("hidden"))) const char kLibraryEnd[] asm("_end");

bool is_own_code(const void* address) noexcept {
  const auto* place = static_cast<const char*>(address);
  return place >= kLibraryStart && place < kLibraryEnd;
}

}  // namespace

// Read by the assembly below.
extern "C" {
__attribute__((visibility("hidden"))) constinit std::atomic<FindSymbol> ebbtide_next_dlsym{nullptr};
}

FindSymbol next_dlsym() noexcept {
  if (const FindSymbol known = ebbtide_next_dlsym.load(std::memory_order_acquire)) return known;
  void* found = nullptr;
  // Found by dlvsym, which no library hooks. dlvsym skips definitions without a version, and so skips the hooks of
  // other preloaded libraries.
  for (const char* version : kVersions) {
    if (found == nullptr) found = ::dlvsym(RTLD_NEXT, "dlsym", version);
  }
  // libc's then says who is next.
  if (found != nullptr) {
    if (void* next = reinterpret_cast<FindSymbol>(found)(RTLD_NEXT, "dlsym")) found = next;
  }
  ebbtide_next_dlsym.store(reinterpret_cast<FindSymbol>(found), std::memory_order_release);
  return reinterpret_cast<FindSymbol>(found);
}

// The hook that answers this dlsym. Null: the real dlsym answers.
extern "C" __attribute__((visibility("hidden"))) void* ebbtide_answer_dlsym(void* handle, const char* symbol,
                                                                            const void* caller) noexcept {
  const FindSymbol next = next_dlsym();
  if (next == nullptr || symbol == nullptr || !is_hooked_name(symbol)) return nullptr;
  // A library behind us in the chain asks for the next function behind itself. RTLD_DEFAULT finds our export.
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) return nullptr;
  // The core's table holds the driver's own functions.
  if (is_own_code(caller) || !is_active()) return nullptr;
  const void* found = next(handle, symbol);
  void* const hook = found != nullptr ? hook_of_symbol(symbol, found) : nullptr;
  // Our own look-ups of optional functions left an error message, although the caller's look-up succeeded.
  if (hook != nullptr) ::dlerror();
  return hook;
}

}  // namespace ebbtide::preload

// void* dlsym(void* handle, const char* symbol)
#if defined(__x86_64__)
asm(R"(
    .text
    .globl dlsym
    .type dlsym, @function
    .p2align 4
dlsym:
    .cfi_startproc
    endbr64
    pushq %rdi
    .cfi_adjust_cfa_offset 8
    pushq %rsi
    .cfi_adjust_cfa_offset 8
    subq $8, %rsp
    .cfi_adjust_cfa_offset 8
    movq 24(%rsp), %rdx
    call ebbtide_answer_dlsym
    addq $8, %rsp
    .cfi_adjust_cfa_offset -8
    popq %rsi
    .cfi_adjust_cfa_offset -8
    popq %rdi
    .cfi_adjust_cfa_offset -8
    testq %rax, %rax
    jnz 1f
    movq ebbtide_next_dlsym(%rip), %rax
    testq %rax, %rax
    jz 1f
    jmpq *%rax
1:
    ret
    .cfi_endproc
    .size dlsym, .-dlsym
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl dlsym
    .type dlsym, %function
    .p2align 4
dlsym:
    .cfi_startproc
    hint #34
    stp x29, x30, [sp, #-32]!
    .cfi_adjust_cfa_offset 32
    .cfi_offset x29, -32
    .cfi_offset x30, -24
    stp x0, x1, [sp, #16]
    mov x29, sp
    mov x2, x30
    bl ebbtide_answer_dlsym
    mov x9, x0
    ldp x0, x1, [sp, #16]
    ldp x29, x30, [sp], #32
    .cfi_restore x30
    .cfi_restore x29
    .cfi_adjust_cfa_offset -32
    cbnz x9, 1f
    adrp x16, ebbtide_next_dlsym
    ldr x16, [x16, :lo12:ebbtide_next_dlsym]
    cbz x16, 1f
    br x16
1:
    mov x0, x9
    ret
    .cfi_endproc
    .size dlsym, .-dlsym
)");
#else
#error "the hook of dlsym is written for x86-64 and aarch64"
#endif
