"""Pause to disk and resume from it. The limit is plain O_DIRECT with the same requests (limits/direct_io.py)."""

from benchmarks import tensors as kept
from benchmarks.cycles import measure_steady
from benchmarks.keepers import Ebbtide
from benchmarks.measured import Measured
from benchmarks.parts import Part
from benchmarks.sizes import Sizes


def measure(sizes: Sizes) -> Measured:
    """As many threads copy as the limit has requests in flight."""
    return measure_steady(Ebbtide(backup="disk"), kept.llama_shapes(sizes.disk_scale), sizes)


def parts(sizes: Sizes) -> list[Part]:
    return [Part("disk.ebbtide", measure, environment={"EBBTIDE_COPY_THREADS": str(sizes.requests_in_flight)})]
