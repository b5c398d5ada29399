"""The same as threads.py with more bytes and more numbers of threads, to choose ebbtide's own number by.

Not among the workloads that run by themselves: `python -m benchmarks run --workloads copy_tuning`. The sizes of the
ring and its pieces are constants of csrc/policy/copy_plan.h: another size is another build.
"""

from benchmarks.measured import Part
from benchmarks.sizes import Sizes
from benchmarks.workloads.threads import parts_for


def parts(sizes: Sizes) -> list[Part]:
    return parts_for("copy_tuning", sizes.tuned_thread_counts, sizes.tuned_bytes)
