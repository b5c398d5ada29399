#pragma once

// Where the files of backups go when nobody wants them any more.
//
// A file's space goes back with its last descriptor, and that takes long where the file system tells the disk at once (ext4 with `discard` and no journal: 0.2 s for each GiB that was written, one file after the other, however many threads ask): so a thread of its own closes them, and ends when none is left.
namespace ebbtide {

using CloseFile = int (*)(int file);

// Closes it in the background; at once where the system starts no thread, and in the child of a fork, which has none.
void close_later(int file, CloseFile close) noexcept;
// Until nothing is left to close. False if there was nothing.
bool wait_until_closed() noexcept;

}  // namespace ebbtide
