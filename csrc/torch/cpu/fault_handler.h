#pragma once

namespace ebbtide::cpu {

// From now on a load or store in memory that is away writes one line on stderr (tag, address, what to do) before
// the handler that was there runs, or the process ends by the signal as it would have. Idempotent. False where the
// system refuses the handler.
bool install_fault_handler();

// Whether EBBTIDE_CHECK's checks are on. The line then does not advise them.
void say_ops_are_checked(bool are_checked);

}  // namespace ebbtide::cpu
