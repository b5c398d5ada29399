"""40 GiB whose content is dropped, in tensors of 1 GiB: nothing but driver calls.

A rest comes before each operation, as between the phases of a program: the driver clears memory that was given back,
and where there is no rest, whoever comes next waits for it, the bare calls as well.
"""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.cycles import Cycle, measure_by_turns
from benchmarks.keepers import Ebbtide
from benchmarks.limits.driver_calls import BareCalls
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.rivals import RIVALS, Maker, least_samples
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker, least: int) -> Measured:
    shapes = kept.equal_shapes(sizes.no_backup_tensors, sizes.no_backup_tensor_bytes)
    keeper = make()
    cycle = Cycle(keeper, shapes, rest_seconds=sizes.rest_seconds)
    if not isinstance(keeper, Ebbtide):
        return measure_by_turns(cycle, sizes, lambda _: None, least)
    bare = BareCalls([kept.size_of([shape]) for shape in shapes], sizes)
    return measure_by_turns(cycle, sizes, bare.take_turn, least)


MAKERS: dict[str, Maker] = {"ebbtide": lambda: Ebbtide(backup=None)}
MAKERS |= {name: makers["drop"] for name, makers in RIVALS.items() if "drop" in makers}


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(f"no_backup.{name}", partial(measure, make=make, least=least_samples(name, sizes)))
        for name, make in MAKERS.items()
    ]
