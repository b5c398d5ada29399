"""Pause and resume from the second cycle on, where the host memory is kept. Every word changes before each pause."""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.baselines import Maker, least_samples, makers
from benchmarks.cycles import Cycle, repeat
from benchmarks.keepers import DropIn, Ebbtide
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker, least: int) -> Measured:
    return repeat(Cycle(make(), kept.llama_shapes(sizes.scale)), sizes, least)


MAKERS = makers(
    "retain",
    ebbtide_retain=lambda: Ebbtide(backup="ram", retain=True),
    ebbtide_pinned=lambda: Ebbtide(backup="pinned"),
    ebbtide_tms=lambda: DropIn(retain=True, backend="pinned"),
)


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(f"steady.{name}", partial(measure, make=make, least=least_samples(name, sizes)))
        for name, make in MAKERS.items()
    ]
