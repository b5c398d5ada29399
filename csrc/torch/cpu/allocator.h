#pragma once

namespace ebbtide::cpu {

// Puts our allocator in front of torch's CPU allocator: what a region's thread allocates comes from its pool, all
// else from the allocator that was there. Once in a process, never taken back: tensors hold its deleter. False
// where another allocator has the higher priority and stays.
bool install_allocator();

}  // namespace ebbtide::cpu
