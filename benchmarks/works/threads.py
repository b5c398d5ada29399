"""Pause and resume with 1, 2, 4, 8 and 14 copying threads: into fresh host memory, then into memory that is kept."""

from benchmarks import tensors as kept
from benchmarks.cycles import Cycle
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes) -> Measured:
    """Half of the 15 GiB for each kind of memory."""
    shapes = kept.llama_shapes(sizes.scale / 2)
    measured = Measured()
    keepers = {"fresh": Ebbtide("fresh", backup="ram"), "kept": Ebbtide("kept", backup="ram", retain=True)}
    for name, keeper in keepers.items():
        cycle = Cycle(keeper, shapes)
        cycle.warm_up(1)
        for _ in range(sizes.samples):
            cycle.run(measured, f"{name}_pause", f"{name}_resume")
    return measured


def parts(sizes: Sizes) -> list[Part]:
    counts = sizes.thread_counts
    return [Part(f"threads.{count}", measure, environment={"EBBTIDE_COPY_THREADS": str(count)}) for count in counts]
