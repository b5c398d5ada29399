"""JAX takes a share of what it is told is free when it starts, and never more: what each --report does to that.

No figures of time: the facts say how large its pool is, and how much of 1.5 times the limit it gets.
"""

import importlib.util
from functools import partial

from benchmarks import device, unmodified
from benchmarks.measured import Measured, SkippedError
from benchmarks.parts import Part
from benchmarks.sizes import Sizes

REPORTS = ("device", "free", "total")


def measure(sizes: Sizes, report: str) -> Measured:
    device.need_gpu("JAX on the CPU takes no device memory")
    if importlib.util.find_spec("jax") is None:
        raise SkippedError("jax is not installed")
    size = sizes.overflow
    count = int(1.5 * size.limit_bytes) // size.jax_array_bytes
    options = {"device_limit": size.limit_bytes, "host_limit": size.jax_host_bytes, "report": report, "summary": True}
    ran = unmodified.start("jax_arrays", options, array_bytes=size.jax_array_bytes, count=count)
    measured = Measured(facts={"exit_status": ran.status, **ran.figures, "said": ran.said})
    if not ran.figures:
        measured.facts["last_words"] = ran.last_words
    if not ran.figures.get("is_right", True):
        measured.faults.append("an array's content was wrong")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part(f"jax_preallocation.{report}", partial(measure, report=report)) for report in REPORTS]
