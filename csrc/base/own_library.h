#pragma once

#include <string>

namespace ebbtide {

// The file that this library was loaded from, split after its last '/'; both empty where it is unknown.
struct OwnLibrary {
  std::string folder;
  std::string name;

  // Whether it is the preload library under a name that launchers of torch_memory_saver look for. Such a file lies in
  // compat/tms/ of the package.
  bool is_torch_memory_savers() const;
};

OwnLibrary own_library();

}  // namespace ebbtide
