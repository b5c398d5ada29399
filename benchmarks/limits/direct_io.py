"""Plain O_DIRECT on the disk: as many requests in flight and as large as ebbtide's disk store makes them.

Into a new file whose space was claimed beforehand, from pages that are warm. Claiming is not timed. `free` is what it
takes to delete the file: some file systems tell the disk at once, and wait for it.
"""

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from benchmarks import tensors as kept
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import Sizes


def directory() -> str:
    """Where ebbtide's disk store would put its files."""
    return os.environ.get("EBBTIDE_DISK_DIRECTORY") or os.environ.get("TMPDIR") or "/var/tmp"


def open_file(path: str) -> tuple[int, bool]:
    """A descriptor, and whether the file system takes O_DIRECT."""
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        return os.open(path, os.O_RDWR), False


Request = Callable[[int, list[mmap.mmap], int], int]


def run_requests(sizes: Sizes, total: int, buffers: list[mmap.mmap], file: int, request: Request) -> float:
    """Seconds for `total` bytes; each thread has a buffer and takes every n-th request."""

    def work(thread: int) -> None:
        step = len(buffers) * sizes.request_bytes
        for offset in range(thread * sizes.request_bytes, total, step):
            done = request(file, [buffers[thread]], offset)
            if done != sizes.request_bytes:
                raise OSError(f"a request of {sizes.request_bytes} bytes moved {done}")

    with ThreadPoolExecutor(len(buffers)) as pool:
        watch = Stopwatch()
        list(pool.map(work, range(len(buffers))))
        return watch.stop()[0]


def measure(sizes: Sizes) -> Measured:
    total = -(-kept.size_of(kept.llama_shapes(sizes.disk_scale)) // sizes.request_bytes) * sizes.request_bytes
    buffers = [mmap.mmap(-1, sizes.request_bytes) for _ in range(sizes.requests_in_flight)]
    for buffer in buffers:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 1, sizes.request_bytes)
    measured = Measured(bytes=total, facts={"requests_in_flight": len(buffers), "request_bytes": sizes.request_bytes})
    for _ in range(sizes.samples):
        with tempfile.NamedTemporaryFile(dir=directory()) as named:
            file, is_direct = open_file(named.name)
            try:
                os.posix_fallocate(file, 0, total)
                write, read = (run_requests(sizes, total, buffers, file, call) for call in (os.pwritev, os.preadv))
            finally:
                os.close(file)
            watch = Stopwatch()
        measured.add("free", watch.stop()[0])
        measured.add("write", write)
        measured.add("read", read)
        measured.facts["is_direct"] = is_direct
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("limits.direct_io", measure)]
