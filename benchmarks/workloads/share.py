"""15 GiB of one process that another reads: from the call of `saver.share`, or the queue's `put`, until it has read.

Beside them the bare calls for the same bytes in one process: export of each handle, import, map and access.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from ebbtide import saver
from ebbtide.errors import Error

from benchmarks import device, peer
from benchmarks.driver import Driver
from benchmarks.limits.driver_calls import cut
from benchmarks.measured import Measured, Part, Stopwatch, turns
from benchmarks.peer import Peer
from benchmarks.sizes import MIB, Sizes

WARM_UP = 1  # turns that load kernels and make the connection
PATIENCE_SECONDS = 10

Send = Callable[[Peer, torch.Tensor], int]

held: list[torch.Tensor] = []  # the peer's


# --- what the peer does -----------------------------------------------------------------------------------------------


def attach_and_read(share: saver.Shared) -> int:
    held.append(saver.attach(share))
    return int(held[0][-1].item())


def get_and_read() -> int:
    held.append(peer.queue_to_peer().get())
    return int(held[0][-1].item())


def drop() -> None:
    held.clear()
    gc.collect()


# --- what is measured -------------------------------------------------------------------------------------------------


def by_share(other: Peer, tensor: torch.Tensor) -> int:
    """The last byte, as the other process read it."""
    return int(other.ask(attach_and_read, saver.share(tensor)))


def by_queue(other: Peer, tensor: torch.Tensor) -> int:
    """The same."""
    other.queue.put(tensor)
    return int(other.ask(get_and_read))


def measure(sizes: Sizes, send: Send) -> Measured:
    """Each turn shares other memory: the first share of a handle exports it."""
    other = Peer()
    measured = Measured(bytes=sizes.shared_bytes)
    for turn in turns(WARM_UP + sizes.samples, WARM_UP + 2 * sizes.samples, sizes.patience_seconds):
        tag = f"shared-{turn}"
        with saver.region(tag, backup=None, exportable=True):
            tensor = torch.full((sizes.shared_bytes,), turn, dtype=torch.uint8, device=saver.device)
        if turn >= WARM_UP:
            time_bare_calls(measured, sizes)
        device.synchronize()
        free_before = device.free_bytes()
        watch = Stopwatch()
        found = send(other, tensor)
        seconds = watch.stop()
        if turn >= WARM_UP:
            measured.add("read", *seconds)
        if found != turn:
            measured.faults.append(f"the other process read {found}, not {turn}")
        if turn >= WARM_UP and free_before - device.free_bytes() > device.allowance_bytes(sizes.shared_bytes):
            measured.faults.append("sharing took device memory")
        other.ask(drop)
        del tensor
        give_back(tag)
    other.stop()
    return measured


def give_back(tag: str) -> None:
    """As soon as the other process has said that it is done with it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        with contextlib.suppress(Error):
            saver.trim(tag)
        if saver.tags()[tag].resident_bytes == 0:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"tag '{tag}' is still lent, {PATIENCE_SECONDS} s after the other process dropped it")
        time.sleep(0.01)


def time_bare_calls(measured: Measured, sizes: Sizes) -> None:
    """Metrics "bare HANDLES", for handles of other memory."""
    driver = Driver(is_exportable=True)
    for handle_bytes in sizes.exported_handle_bytes:
        pieces = cut(sizes.shared_bytes, handle_bytes)
        handles = [driver.create(size) for size in pieces]
        start = driver.reserve(sum(pieces))
        addresses = [start + sum(pieces[:index]) for index in range(len(pieces))]
        watch = Stopwatch()
        files = [driver.export(handle) for handle in handles]
        imported = [driver.import_from(file) for file in files]
        for address, size, handle in zip(addresses, pieces, imported, strict=True):
            driver.map(address, size, handle)
        driver.set_access(start, sum(pieces))
        measured.add(f"bare {handle_bytes // MIB} MiB", watch.stop()[0])
        for address, size in zip(addresses, pieces, strict=True):
            driver.unmap(address, size)
        for handle in (*imported, *handles):
            driver.release(handle)
        driver.free_range(start, sum(pieces))
        for file in files:
            os.close(file)


def parts(_: Sizes) -> list[Part]:
    variables = peer.environment()
    ways: dict[str, Send] = {"share": by_share, "queue": by_queue}
    return [Part(f"share.{way}", partial(measure, send=send), environment=variables) for way, send in ways.items()]
