#pragma once

#include "api/ebbtide.h"

namespace ebbtide::compat {

// What torch_memory_saver would keep for the calling thread: its own policy, else that of the program, else that of the
// variables. With a tag and a backup in any case.
ebbtide_thread_policy policy_in_force() noexcept;

}  // namespace ebbtide::compat
