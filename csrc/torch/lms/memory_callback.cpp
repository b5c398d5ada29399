#include "torch/lms/memory_callback.h"

#include <c10/util/Registry.h>
#include <dlfcn.h>

#include <memory>
#include <string>

// As torch declares it in a header that includes CUDA's, which need not be installed.
namespace c10 {
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};
}  // namespace c10

namespace ebbtide::lms {
namespace {

using Callbacks = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;

bool (*called)() = nullptr;

class Callback final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override { return called(); }
};

// c10::FreeCudaMemoryCallbacksRegistry(), of the library that is in the process. Where std::string is the one of C++11,
// the compiler adds a tag to the function's name, for the string in the type that it returns.
constexpr const char* kNames[] = {"_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev",
                                  "_ZN3c1031FreeCudaMemoryCallbacksRegistryEv"};

Callbacks* find_callbacks() {
  void* const library = ::dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* found = nullptr;
  for (const char* const name : kNames) {
    if (found == nullptr) found = ::dlsym(library, name);
  }
  ::dlclose(library);
  return found == nullptr ? nullptr : reinterpret_cast<Callbacks* (*)()>(found)();
}

}  // namespace

bool add_memory_callback(bool (*function)()) {
  static const bool is_added = [function] {
    Callbacks* const callbacks = find_callbacks();
    if (callbacks == nullptr) return false;
    called = function;
    callbacks->Register("ebbtide.lms", [] { return std::make_unique<Callback>(); });
    return true;
  }();
  return is_added;
}

}  // namespace ebbtide::lms
