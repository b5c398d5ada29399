"""Pause and resume with 1, 2, 4, 8 and 14 copying threads: into fresh host memory, then into memory that is kept."""

from functools import partial

from benchmarks import tensors as kept
from benchmarks.cycles import Cycle
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes

TENSORS = 16


def measure(sizes: Sizes, size_bytes: int) -> Measured:
    """Metrics are "fresh_pause" and so on."""
    measured = Measured()
    keepers = {"fresh": Ebbtide(backup="ram"), "kept": Ebbtide(backup="ram", retain=True)}
    for name, keeper in keepers.items():
        cycle = Cycle(keeper, kept.equal_shapes(TENSORS, size_bytes // TENSORS))
        cycle.warm_up()
        for _ in range(sizes.samples):
            cycle.run(measured, f"{name}_pause", f"{name}_resume")
    return measured


def parts_for(workload: str, counts: tuple[int, ...], size_bytes: int) -> list[Part]:
    """A part for each number of threads."""
    run = partial(measure, size_bytes=size_bytes)
    return [Part(f"{workload}.{count}", run, environment={"EBBTIDE_COPY_THREADS": str(count)}) for count in counts]


def parts(sizes: Sizes) -> list[Part]:
    return parts_for("threads", sizes.thread_counts, sizes.copied_bytes)
