#pragma once

#include <optional>
#include <string>

#include "policy/host_room.h"

namespace ebbtide {

// Reads the system's limits of memory: /proc/meminfo and every memory cgroup above this process, v1 and v2, under root
// ("" for the real system; tests give a made-up tree). A file that is missing or can't be read is no limit.
policy::HostMemory read_host_memory(const std::string& root = "");

// The least cpu quota of every cgroup above this process, in cores (1.5: one and a half); none where nothing limits it.
std::optional<double> read_cpu_quota(const std::string& root = "");

}  // namespace ebbtide
