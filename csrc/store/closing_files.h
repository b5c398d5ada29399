#pragma once

#include <cstddef>
#include <cstdint>

// Closes the files of discarded backups in a thread of their own, which ends when none is left. The close frees the
// space, which takes long if the file system tells the disk at once: ext4 with `discard` and no journal takes 0.2 s for
// each GiB that was written, one file after another with any number of threads.
namespace ebbtide {

struct FileCalls;

// Closes a private file in the background, or at once if the system starts no thread. In the child of a fork, which has
// closed it, it does nothing. Frees the first free_bytes of it before that, even if another process has it mapped.
void close_later(int file, size_t free_bytes, const FileCalls& calls) noexcept;
// Waits until no file is left to close.
void wait_until_closed() noexcept;
// The number of files closed so far. A caller that is refused space or descriptors waits until no file is left to
// close, and retries if this number has grown.
uint64_t files_closed() noexcept;

}  // namespace ebbtide
