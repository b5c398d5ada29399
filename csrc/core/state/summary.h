#pragma once

namespace ebbtide {

class Saver;

// EBBTIDE_SUMMARY=1: one line on stderr when the process exits, with what went to the host. Not in a forked child, nor where the process ends without exit handlers. saver lives for ever.
void summarise_at_exit(const Saver& saver);

}  // namespace ebbtide
