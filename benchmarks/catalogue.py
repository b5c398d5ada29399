"""Every workload and every limit, by name.

A new file in workloads/ or limits/ needs a line here; a new baseline one in baselines/__init__.py.
"""

from benchmarks.limits import device_read, direct_io, driver_calls, host_touch, link, zero_copy
from benchmarks.workloads import (
    copy_tuning,
    curve,
    disk,
    early_kernel,
    first_pause,
    forward,
    hidden_costs,
    host_chunks,
    jax_preallocation,
    malloc,
    no_backup,
    overflow_read,
    prepared_pause,
    run_generate,
    run_overhead,
    run_pauseable,
    run_spike,
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
    "zero_copy": zero_copy.parts,
}

# In the order in which they run: the most important first.
WORKLOADS = {
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
    "overflow_read": overflow_read.parts,
    "host_chunks": host_chunks.parts,
    "run_spike": run_spike.parts,
    "run_generate": run_generate.parts,
    "run_overhead": run_overhead.parts,
    "run_pauseable": run_pauseable.parts,
    "jax_preallocation": jax_preallocation.parts,
    "threads": threads.parts,
    "hidden_costs": hidden_costs.parts,
    "curve": curve.parts,
    "copy_tuning": copy_tuning.parts,
}
# Those that start programs, which takes most of the time of a small run.
STARTING_PROGRAMS = ("run_spike", "run_generate", "run_overhead", "run_pauseable", "jax_preallocation")
# Those that only run where they are named.
ON_DEMAND = ("copy_tuning",)

# The limits that a workload is held against, besides the link.
NEEDS = {
    "first_pause": ["host_touch"],
    "unchanged": ["device_read"],
    "no_backup": ["driver_calls"],
    "disk": ["direct_io"],
    "overflow_read": ["zero_copy", "device_read"],
    "run_generate": ["zero_copy"],
    "threads": ["host_touch"],
}
# Other workloads that a workload is held against.
COMPARED_WITH = {"prepared_pause": ["first_pause"], "unchanged": ["steady"]}
