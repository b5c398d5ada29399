"""How long it takes to get host memory that the device reads: from the pool, and made anew; and to fill the pool."""

from ebbtide import _core, saver

from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes

SPLIT = 1


def take_and_free(size_bytes: int, metric: str, measured: Measured) -> None:
    """All of it on the host: the device's limit is the memory in use."""
    watch = Stopwatch()
    address = _core.alloc("chunks", size_bytes, overflow=SPLIT)
    measured.add(metric, watch.stop()[0])
    found = saver.tags()["chunks"].host_bytes
    watch = Stopwatch()
    _core.free(address)
    measured.add(f"{metric}_free", watch.stop()[0])
    if found != size_bytes:
        measured.faults.append(f"{found} bytes lie on the host, of {size_bytes}")


def measure(sizes: Sizes) -> Measured:
    size_bytes = sizes.overflow.chunks_bytes
    assert saver.device  # decides which driver this is
    saver.configure(device_limit=_core.query_device(0).held_bytes, reserve=0, host_pool=0)
    measured = Measured(bytes=size_bytes)
    for _ in range(sizes.shown_samples + 1):
        take_and_free(size_bytes, "fresh", measured)
    for _ in range(sizes.shown_samples):
        saver.configure(host_pool=0)  # gives the pool back
        watch = Stopwatch()
        saver.configure(host_pool=size_bytes)
        _core.fill_host_pool(0)
        measured.add("fill_pool", watch.stop()[0])
    for _ in range(sizes.samples):
        take_and_free(size_bytes, "from_pool", measured)
    measured.facts["host_pool_bytes"] = saver.stats()["host_pool_bytes"]
    saver.configure(device_limit=None, host_pool=0)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("host_chunks.ebbtide", measure)]
