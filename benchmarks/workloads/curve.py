"""Pause and resume over sizes from 2 MiB to 40 GiB, for the plots.

Metrics are "pause SIZE" and "resume SIZE", in bytes. Baselines that no target is held against are
measured with the smaller sizes only.
"""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.baselines import BASELINES, COUNTED_BASELINES, least_samples, makers
from benchmarks.cycles import Cycle
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured, Part
from benchmarks.sizes import GIB, Sizes

TENSOR_BYTES = GIB
SMALL_BYTES, SMALL_SAMPLES = GIB // 2, 3  # up to which size, so many times as many samples
MAKERS = makers(
    "retain",
    ebbtide_retain=lambda: Ebbtide(backup="ram", retain=True),
    ebbtide_pinned=lambda: Ebbtide(backup="pinned"),
    ebbtide_ram=lambda: Ebbtide(backup="ram"),
)


def measure(sizes: Sizes, name: str) -> Measured:
    """`bytes` stays 0: each metric has its own."""
    measured = Measured()
    is_shown_only = name in BASELINES and name not in COUNTED_BASELINES
    for size in sizes.baseline_curve_bytes if is_shown_only else sizes.curve_bytes:
        count = max(1, size // TENSOR_BYTES)
        cycle = Cycle(MAKERS[name](), kept.equal_shapes(count, size // count))
        cycle.warm_up()
        samples = least_samples(name, sizes) * (SMALL_SAMPLES if size <= SMALL_BYTES else 1)
        for _ in range(samples):
            cycle.run(measured, f"pause {size}", f"resume {size}")
    measured.bytes = 0
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part(f"curve.{name}", partial(measure, name=name)) for name in MAKERS]
