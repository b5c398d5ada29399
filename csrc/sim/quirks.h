// What drivers of AMD's devices were seen to do and NVIDIA's do not (csrc/DESIGN.md, F48 to F52): each can be switched
// on by EBBTIDE_SIM_QUIRKS, whatever names the simulator is called by.
#pragma once

namespace ebbtide::sim {

enum class Quirk {
  kHeld,     // memory that is unmapped and released stays in use until its range of addresses is freed
  kStale,    // memory of a new handle shows old bytes
  kLate,     // memory that was given back is free some time later
  kHandles,  // no handle of more than 256 MiB
  kHost,     // no handles of host memory
};

bool has(Quirk quirk) noexcept;
// From the environment, as resets do.
void read_quirks() noexcept;

}  // namespace ebbtide::sim
