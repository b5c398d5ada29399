// Whether this thread has written a weight through one of torch's operators. Unlike a tensor's version, that tells of
// writes through `.data` as well. A kernel that gets a bare pointer is not seen.
#pragma once

namespace ebbtide::lms {

// From now on, until it is ended; it may be begun and ended again. It costs each operator about a microsecond.
void begin_write_watch();
void end_write_watch() noexcept;
// Whether a weight was written since the watch began, or since this was asked last.
bool take_written_weights() noexcept;

}  // namespace ebbtide::lms
