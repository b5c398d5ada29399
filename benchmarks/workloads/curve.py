"""Pause and resume over sizes from 2 MiB to 40 GiB, for the plots.

Metrics are "pause SIZE" and "resume SIZE", in bytes. Baselines are measured with the smaller sizes only.
"""

from functools import partial
from typing import Any

from benchmarks import tensors as kept
from benchmarks.baselines import BASELINES, least_samples
from benchmarks.cycles import Cycle
from benchmarks.keepers import Ebbtide, Keeper
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import GIB, Sizes

TENSOR_BYTES = GIB
POLICIES: dict[str, dict[str, Any]] = {
    "ebbtide_retain": {"backup": "ram", "retain": True},
    "ebbtide_pinned": {"backup": "pinned"},
    "ebbtide_ram": {"backup": "ram"},
}
CURVED_BASELINES = [name for name, makers in BASELINES.items() if "retain" in makers]


def make_keeper(name: str, size_bytes: int) -> Keeper:
    if name in POLICIES:
        return Ebbtide(f"curve-{size_bytes}", **POLICIES[name])
    return BASELINES[name]["retain"]()


def measure(sizes: Sizes, name: str) -> Measured:
    """`bytes` stays 0: each metric has its own."""
    measured = Measured()
    for size in sizes.curve_bytes if name in POLICIES else sizes.baseline_curve_bytes:
        count = max(1, size // TENSOR_BYTES)
        cycle = Cycle(make_keeper(name, size), kept.equal_shapes(count, size // count))
        cycle.warm_up()
        for _ in range(least_samples(name, sizes)):
            cycle.run(measured, f"pause {size}", f"resume {size}")
    measured.bytes = 0
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part(f"curve.{name}", partial(measure, name=name)) for name in (*POLICIES, *CURVED_BASELINES)]
