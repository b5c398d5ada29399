#pragma once

namespace ebbtide::cpu {

// Replaces torch's CPU allocator by one that serves the threads of a region from the region's pool, and passes every
// other request to the previous allocator. Done once in a process and never undone, because tensors hold its deleter.
// False if another allocator has the higher priority and stays.
bool install_allocator();

}  // namespace ebbtide::cpu
