// What torch's allocator for GPUs asks before it gives back what it caches.
#pragma once

namespace ebbtide::lms {

// From now on torch calls it where no free block serves an allocation, before it asks the driver for a segment, and
// looks again where it returns true. It runs under torch's lock, and its exceptions end the allocation. Once for the
// process: later calls do nothing. False where this torch has no such callbacks.
bool add_memory_callback(bool (*function)());

}  // namespace ebbtide::lms
