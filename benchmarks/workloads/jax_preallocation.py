"""JAX takes a share of the reported device memory when it starts, and never more: the effect of each --report.

No figures of time that others could be held against: the facts say how much JAX preallocated, how much of that lay on
the host, how far it came with 1.5 times the limit, and the seconds. The three run at once, since JAX waits ten seconds
before it says that it is out of memory.
"""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks import device, unmodified
from benchmarks.measured import Measured, Part, SkippedError
from benchmarks.sizes import OverflowSize, Sizes
from benchmarks.unmodified import Outcome

REPORTS = ("device", "free", "total")
TIMEOUT_SECONDS = 60
# The rest of the part's process, with some to spare.
LEAST_SECONDS = TIMEOUT_SECONDS + 8
# Versions are not compared, no other platform is looked for, nothing is tuned: JAX takes memory as it does without.
ENVIRONMENT = {
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "JAX_PLATFORMS": "cuda",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}


def array_count(size: OverflowSize) -> int:
    return int(1.5 * size.jax_limit_bytes) // size.jax_array_bytes


def start(size: OverflowSize, report: str) -> Outcome:
    limits = {"device_limit": size.jax_limit_bytes, "host_limit": size.jax_host_bytes}
    options = {**limits, "report": report, "summary": True}
    arguments = {"array_bytes": size.jax_array_bytes, "count": array_count(size)}
    return unmodified.start("jax_arrays", options, TIMEOUT_SECONDS, ENVIRONMENT, **arguments)


def facts_of(ran: Outcome, wanted_bytes: int) -> dict[str, Any]:
    """`host_bytes` is as exact as the summary: three digits; None where it said nothing."""
    figures = ran.figures
    has_finished = ran.status == 0 and figures.get("held_bytes") == wanted_bytes and not figures["refusal"]
    facts = {
        "has_finished": has_finished and figures["is_right"],
        "host_bytes": unmodified.spilled_bytes(ran.said),
        **figures,
        "seconds": round(ran.seconds, 1),
        "exit_status": ran.status,
        "said": ran.said,
    }
    return facts if ran.status == 0 else {**facts, "last_words": ran.last_words}


def measure(sizes: Sizes) -> Measured:
    """Facts are "REPORT FACT"; a program that fails or takes too long is one of them."""
    device.need_gpu("JAX on the CPU takes no device memory")
    if importlib.util.find_spec("jax") is None:
        raise SkippedError("jax is not installed")
    size = sizes.overflow
    wanted_bytes = array_count(size) * size.jax_array_bytes
    measured = Measured()
    with ThreadPoolExecutor(len(REPORTS)) as pool:
        outcomes = pool.map(lambda report: start(size, report), REPORTS)
        for report, ran in zip(REPORTS, outcomes, strict=True):
            measured.facts |= {f"{report} {name}": value for name, value in facts_of(ran, wanted_bytes).items()}
            if not ran.figures.get("is_right", True):
                measured.faults.append(f"{report}: an array's content was wrong")
    return measured


def parts(_: Sizes) -> list[Part]:
    return [Part("jax_preallocation.reports", measure, least_seconds=LEAST_SECONDS)]
