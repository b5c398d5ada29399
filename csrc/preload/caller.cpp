#include "preload/caller.h"

#include <dlfcn.h>
#include <unwind.h>

#include <span>

namespace ebbtide::preload {
namespace {

// About five frames lie between torch's allocator and the driver.
constexpr int kDeepest = 32;

// Those that torch's allocator calls for memory, and that then call the driver: torch's pluggable allocators lie in
// libtorch_cuda.so.
constexpr std::string_view kOtherAllocators[] = {"libtorch_cuda.so", "libnccl.so"};

struct Search {
  std::string_view wanted;
  std::span<const std::string_view> ends_at;
  int depth = 0;
  bool is_found = false;
};

_Unwind_Reason_Code look_at_frame(_Unwind_Context* context, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(_Unwind_GetIP(context)), &info) != 0 && info.dli_fname != nullptr) {
    std::string_view file = info.dli_fname;
    file.remove_prefix(file.rfind('/') + 1);
    search.is_found = file == search.wanted;
    for (const std::string_view end : search.ends_at) {
      if (file.starts_with(end)) return _URC_END_OF_STACK;
    }
  }
  return search.is_found || ++search.depth >= kDeepest ? _URC_END_OF_STACK : _URC_NO_REASON;
}

bool is_found(Search search) noexcept {
  _Unwind_Backtrace(&look_at_frame, &search);
  return search.is_found;
}

}  // namespace

bool is_called_by(std::string_view library_file) noexcept { return is_found({.wanted = library_file}); }

bool is_called_by_torch() noexcept { return is_found({.wanted = kTorchAllocator, .ends_at = kOtherAllocators}); }

}  // namespace ebbtide::preload
