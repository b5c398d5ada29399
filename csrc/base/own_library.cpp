#include "base/own_library.h"

#include <dlfcn.h>

namespace ebbtide {

OwnLibrary own_library() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&own_library), &info) == 0 || info.dli_fname == nullptr) return {};
  const std::string path = info.dli_fname;
  const size_t end = path.rfind('/') + 1;  // 0 where there is none
  return {path.substr(0, end), path.substr(end)};
}

bool OwnLibrary::is_torch_memory_savers() const { return name.starts_with("torch_memory_saver"); }

}  // namespace ebbtide
