"""Every work and every limit, by name.

A new file in works/ or limits/ needs a line here; a new rival one in rivals/__init__.py.
"""

from benchmarks.limits import device_read, direct_io, driver_calls, host_touch, link
from benchmarks.works import (
    copy_tuning,
    curve,
    disk,
    early_kernel,
    first_pause,
    forward,
    hidden_costs,
    malloc,
    no_backup,
    prepared_pause,
    steady,
    swap,
    threads,
    unchanged,
)

LIMITS = {
    "link": link.parts,
    "driver_calls": driver_calls.parts,
    "device_read": device_read.parts,
    "host_touch": host_touch.parts,
    "direct_io": direct_io.parts,
}

# In the order in which they run: the most important first.
WORKS = {
    "first_pause": first_pause.parts,
    "prepared_pause": prepared_pause.parts,
    "steady": steady.parts,
    "unchanged": unchanged.parts,
    "no_backup": no_backup.parts,
    "swap": swap.parts,
    "early_kernel": early_kernel.parts,
    "forward": forward.parts,
    "disk": disk.parts,
    "malloc": malloc.parts,
    "threads": threads.parts,
    "hidden_costs": hidden_costs.parts,
    "curve": curve.parts,
    "copy_tuning": copy_tuning.parts,
}
# Those that only run where they are named.
ON_DEMAND = ("copy_tuning",)

# The limits that a work is held against, besides the link.
NEEDS = {
    "first_pause": ["host_touch"],
    "unchanged": ["driver_calls", "device_read"],
    "no_backup": ["driver_calls"],
    "early_kernel": ["driver_calls"],
    "disk": ["direct_io"],
    "threads": ["host_touch"],
}
# Other works that a work is held against.
COMPARED_WITH = {"prepared_pause": ["first_pause"], "unchanged": ["steady"]}
