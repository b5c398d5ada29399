#pragma once

#include <cstddef>
#include <cstdint>

// Where the files of backups go when nobody wants them any more.
//
// A file's space goes back with its last descriptor, and that takes long where the file system tells the disk at once (ext4 with `discard` and no journal: 0.2 s for each GiB that was written, one file after the other, however many threads ask): so a thread of its own closes them, and ends when none is left.
namespace ebbtide {

struct FileCalls;

// Closes it in the background; at once where the system starts no thread, and in the child of a fork, which has none. The first free_bytes of it are given back before, whoever else has a descriptor (a child that was forked meanwhile).
void close_later(int file, size_t free_bytes, const FileCalls& calls) noexcept;
// Until nothing is left to close.
void wait_until_closed() noexcept;
// How many have been closed by now. Who is refused what files hold, space or descriptors, waits until nothing is left to close, and asks again if it is more than before.
uint64_t files_closed() noexcept;

}  // namespace ebbtide
