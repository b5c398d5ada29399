"""40 GiB whose content is dropped, in tensors of 1 GiB: nothing but driver calls.

A rest comes before each operation, as between the phases of a program: the driver clears memory that was given back,
and where there is no rest, the next caller waits for it, the bare calls as well.

The bare calls are made while the tensors are away, those of baselines as well, so that each claims memory that was
given back just before. Beside tensors that are there they would claim other memory than these: bare calls
alone took 3.5 ms for memory that had been free for a while, and 11.5 for what came back just before (H200, 40 GiB).
"""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.baselines import Maker, least_samples, makers
from benchmarks.cycles import Cycle, repeat
from benchmarks.keepers import DropIn, Ebbtide
from benchmarks.limits.driver_calls import BareCalls
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker, least: int) -> Measured:
    shapes = kept.equal_shapes(sizes.no_backup_tensors, sizes.no_backup_tensor_bytes)
    keeper = make()
    bare = BareCalls(kept.size_of(shapes), sizes)
    # The driver's time differs twofold from one time to the next, and each turn has one size of bare handles: twice
    # as many samples as elsewhere.
    return repeat(Cycle(keeper, shapes, kept.change, sizes.rest_seconds, while_paused=bare.take_turn), sizes, 2 * least)


MAKERS = makers("drop", ebbtide=lambda: Ebbtide(backup=None), ebbtide_tms=lambda: DropIn(backup=False))


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(f"no_backup.{name}", partial(measure, make=make, least=least_samples(name, sizes)))
        for name, make in MAKERS.items()
    ]
