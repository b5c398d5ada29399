"""How fast the system gives fresh host memory: huge pages, touched for the first time by several threads.

No first pause into memory of its own can be faster than this.
"""

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes

RANGE_BYTES = 32 << 20


def touch(size_bytes: int, threads: int) -> tuple[float, float]:
    """Seconds by the clock and of processor time."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(abs, range(4 * threads)))  # so that starting threads is not timed
        watch = Stopwatch()
        area = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            area.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * size_bytes).from_buffer(area)
        start = ctypes.addressof(view)
        offsets = range(0, size_bytes, RANGE_BYTES)
        # ctypes gives the interpreter's lock away for the length of a call.
        list(pool.map(lambda at: ctypes.memset(start + at, 1, min(RANGE_BYTES, size_bytes - at)), offsets))
        times = watch.stop()
    del view
    area.close()
    return times


def measure(sizes: Sizes) -> Measured:
    """A metric for each thread count: "1 threads" and so on."""
    size = sizes.touched_bytes
    measured = Measured(bytes=size)
    for threads in sizes.thread_counts:
        for _ in range(sizes.samples):
            measured.add(f"{threads} threads", *touch(size, threads))
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.host_touch", measure)]
