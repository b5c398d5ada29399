"""What the system did for its memory meanwhile: page faults, huge pages, and memory that a virtual machine got."""

import resource
from pathlib import Path

MEMINFO = ("MemTotal", "MemFree", "AnonHugePages")  # kB
VMSTAT = ("pgfault", "pgmajfault", "thp_fault_alloc", "thp_fault_fallback", "compact_stall", "allocstall_normal")


def _read(path: str) -> dict[str, int]:
    pairs = (line.split()[:2] for line in Path(path).read_text().splitlines())
    return {name.rstrip(":"): int(value) for name, value in pairs}


class HostMemory:
    """Counts from when it was made, or from the last begin()."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._before = _read("/proc/vmstat")
        self._memory = _read("/proc/meminfo")

    def since(self) -> dict[str, float]:
        """Seconds in the kernel and outside, switches of threads that waited and that were interrupted, counts of
        /proc/vmstat, and MiB of /proc/meminfo: before, and by how much it grew."""
        usage, now, memory = resource.getrusage(resource.RUSAGE_SELF), _read("/proc/vmstat"), _read("/proc/meminfo")
        found: dict[str, float] = {
            "system_seconds": usage.ru_stime - self._usage.ru_stime,
            "user_seconds": usage.ru_utime - self._usage.ru_utime,
            "waited": usage.ru_nvcsw - self._usage.ru_nvcsw,
            "interrupted": usage.ru_nivcsw - self._usage.ru_nivcsw,
        }
        found |= {name: now[name] - self._before[name] for name in VMSTAT if name in now}
        for name in MEMINFO:
            found[f"{name}_mib"] = self._memory[name] >> 10
            found[f"{name}_growth_mib"] = (memory[name] - self._memory[name]) >> 10
        return found
