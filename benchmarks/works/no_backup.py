"""40 GiB whose content is dropped, in tensors of 1 GiB: nothing but driver calls."""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.cycles import measure_steady
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.rivals import RIVALS, Maker, least_samples
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker, least: int) -> Measured:
    shapes = kept.equal_shapes(sizes.no_backup_tensors, sizes.no_backup_tensor_bytes)
    return measure_steady(make(), shapes, sizes, least)


MAKERS: dict[str, Maker] = {"ebbtide": lambda: Ebbtide(backup=None)}
MAKERS |= {name: makers["drop"] for name, makers in RIVALS.items() if "drop" in makers}


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(f"no_backup.{name}", partial(measure, make=make, least=least_samples(name, sizes)))
        for name, make in MAKERS.items()
    ]
