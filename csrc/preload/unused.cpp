// EBBTIDE_SUMMARY=1 in a program that never asked for device memory: it says so at exit, since its user expects a
// summary. So do the processes that it starts, if they have CUDA or torch.
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

#include "base/settings.h"
#include "core/state/core.h"
#include "core/state/exit.h"
#include "preload/resolver.h"

namespace ebbtide::preload {
namespace {

// `ebbtide run --summary` becomes the program, so the program has its number (python/ebbtide/cli/run.py).
constexpr const char* kStarted = "_EBBTIDE_STARTED";

pid_t watched_process = 0;

bool is_what_run_started() {
  const char* const number = std::getenv(kStarted);
  return number != nullptr && std::strtol(number, nullptr, 10) == watched_process;
}

int is_of_cuda(dl_phdr_info* library, size_t /*size*/, void* found) {
  const char* const slash = std::strrchr(library->dlpi_name, '/');
  const std::string_view name = slash == nullptr ? library->dlpi_name : slash + 1;
  if (name.starts_with("libcuda") || name.starts_with("libtorch")) *static_cast<bool*>(found) = true;
  return 0;
}

void tell_if_unused() {
  if (::getpid() != watched_process || Core::instance_if_made() != nullptr) return;
  bool has_cuda = false;
  ::dl_iterate_phdr(&is_of_cuda, &has_cuda);
  if (!has_cuda && !is_what_run_started()) return;  // what a script calls
  try {
    write_summary_line(has_cuda ? "it never asked CUDA for device memory" : "it used neither CUDA nor torch");
  } catch (...) {
    // No memory for the text: the process ends anyway.
  }
}

__attribute__((constructor)) void watch_exit() {
  if (!is_active() || !read_switch(Setting::kSummary, false)) return;
  watched_process = ::getpid();
  std::atexit(&tell_if_unused);
}

}  // namespace
}  // namespace ebbtide::preload
