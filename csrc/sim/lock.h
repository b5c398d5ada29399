// A function that takes a Lock& wants the simulator's mutex held; it may give it back for a while, and says so.
#pragma once

#include <mutex>

namespace ebbtide::sim {

using Lock = std::unique_lock<std::mutex>;

}  // namespace ebbtide::sim
