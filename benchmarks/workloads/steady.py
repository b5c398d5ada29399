"""Pause and resume from the second cycle on, where the host memory is kept. Every word changes before each pause."""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.baselines import BASELINES, Maker, least_samples
from benchmarks.cycles import measure_steady
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker, least: int) -> Measured:
    return measure_steady(make(), kept.llama_shapes(sizes.scale), sizes, least)


MAKERS: dict[str, Maker] = {
    "ebbtide_retain": lambda: Ebbtide(backup="ram", retain=True),
    "ebbtide_pinned": lambda: Ebbtide(backup="pinned"),
}
MAKERS |= {name: makers["retain"] for name, makers in BASELINES.items() if "retain" in makers}


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(f"steady.{name}", partial(measure, make=make, least=least_samples(name, sizes)))
        for name, make in MAKERS.items()
    ]
