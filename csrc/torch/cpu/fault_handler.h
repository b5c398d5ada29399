#pragma once

namespace ebbtide::cpu {

// From now on, a load or store in memory that is paused writes one line on stderr: the tag, the address, and what to
// do. Then the previous handler runs, or the process ends by the signal as before. Idempotent. False if the system
// refuses the handler.
bool install_fault_handler();

// Whether the checks of EBBTIDE_CHECK are on. If so, the line does not recommend them.
void say_ops_are_checked(bool are_checked);

}  // namespace ebbtide::cpu
