// A function with a Lock& parameter requires that the simulator's mutex is held. If it may release the lock for a
// while, its comment says so.
#pragma once

#include <mutex>

namespace ebbtide::sim {

using Lock = std::unique_lock<std::mutex>;

}  // namespace ebbtide::sim
