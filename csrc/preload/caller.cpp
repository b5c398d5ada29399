#include "preload/caller.h"

#include <dlfcn.h>
#include <unwind.h>

namespace ebbtide::preload {
namespace {

// About five frames lie between torch's allocator and the driver.
constexpr int kDeepest = 32;

struct Search {
  std::string_view wanted;
  int depth = 0;
  bool is_found = false;
};

_Unwind_Reason_Code look_at_frame(_Unwind_Context* context, void* argument) {
  auto& search = *static_cast<Search*>(argument);
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(_Unwind_GetIP(context)), &info) != 0 && info.dli_fname != nullptr) {
    const std::string_view file = info.dli_fname;
    search.is_found = file.substr(file.rfind('/') + 1) == search.wanted;
  }
  return search.is_found || ++search.depth >= kDeepest ? _URC_END_OF_STACK : _URC_NO_REASON;
}

}  // namespace

bool is_called_by(std::string_view library_file) noexcept {
  Search search{.wanted = library_file};
  _Unwind_Backtrace(&look_at_frame, &search);
  return search.is_found;
}

}  // namespace ebbtide::preload
