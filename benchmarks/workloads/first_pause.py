"""The first pause of a fresh process, into untouched host memory, and the resume that gives it back.

The fact "pauses" says of each process what the system did for its memory during the pause.
"""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.baselines import Maker, least_samples, makers
from benchmarks.cycles import Cycle
from benchmarks.host import HostMemory
from benchmarks.keepers import DropIn, Ebbtide
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes, make: Maker) -> Measured:
    measured, memory = Measured(), HostMemory()
    cycle = Cycle(
        make(),
        kept.llama_shapes(sizes.scale),
        before_pause=memory.begin,
        while_paused=lambda measured: measured.facts.update(pauses=[memory.since()]),
    )
    cycle.run(measured)
    return measured


MAKERS = makers("backup", ebbtide=lambda: Ebbtide(backup="ram"), ebbtide_tms=DropIn)


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part(
            f"first_pause.{name}", partial(measure, make=make), is_first_only=True, processes=least_samples(name, sizes)
        )
        for name, make in MAKERS.items()
    ]
