"""The first pause of a fresh process, into host memory that nobody has touched, and the resume that gives it back."""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.baselines import BASELINES, Maker, least_samples
from benchmarks.cycles import measure_first
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker) -> Measured:
    return measure_first(make(), kept.llama_shapes(sizes.scale))


MAKERS: dict[str, Maker] = {"ebbtide": lambda: Ebbtide(backup="ram")}
MAKERS |= {name: makers["backup"] for name, makers in BASELINES.items() if "backup" in makers}


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(
            f"first_pause.{name}", partial(measure, make=make), is_first_only=True, processes=least_samples(name, sizes)
        )
        for name, make in MAKERS.items()
    ]
