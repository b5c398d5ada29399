"""The first pause of a fresh process after `saver.prepare`, whose own time is a metric beside it."""

from ebbtide import saver

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.cycles import Cycle
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes


def measure(sizes: Sizes) -> Measured:
    measured = Measured()
    keeper = Ebbtide(backup="ram")
    cycle = Cycle(keeper, kept.llama_shapes(sizes.scale))
    device.synchronize()
    watch = Stopwatch()
    saver.prepare(keeper.tag, wait=True)
    measured.add("prepare", *watch.stop())
    cycle.run(measured)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("prepared_pause.ebbtide", measure, is_first_only=True)]
