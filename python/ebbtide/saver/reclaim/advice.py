"""What a program can do where torch is out of memory while tags cache memory that nothing uses.

torch asks nobody for memory of other pools, and its own message can't be changed. While it holds its lock nothing may
be freed. It calls observers after it has let the lock go, before it raises: one of them logs a line.
"""

import contextlib
import functools
import logging

from ebbtide import logs
from ebbtide.errors import StateError
from ebbtide.saver.pools import backends, captures, pool_segments, region_pools
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.sizes import format_size
from ebbtide.torch_support import torch_names

_MOST_TAGS = 3  # that are named
_latest: dict[str, int] = {}  # what the latest line was about


@functools.cache
def install() -> None:
    """From now on torch calls `advise` where it is out of memory. Initialises CUDA."""
    with contextlib.suppress(StateError):  # a torch without observers
        torch_names.find("_C._cuda_attach_out_of_memory_observer")(advise)


def cached_bytes(device: int) -> dict[str, int]:
    """What `saver.trim` would give back on this device, in bytes by tag, the most first."""
    backend = backends.existing_backend()
    if backend is None or captures.is_capturing():
        return {}
    idle = [pool for _, pool in region_pools.registry.idle() if pool.device == device and not pool.is_captured]
    free = {
        segment.address
        for segments in pool_segments.look_at(backend, idle).values()
        for segment in segments or ()
        if segment.is_free
    }
    found: dict[str, int] = {}
    for info in allocations_of([]) if free else ():
        on_device = info.resident_bytes - info.host_bytes
        if info.address in free and on_device > 0:
            found[info.tag] = found.get(info.tag, 0) + on_device
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def advise(device: int, wanted_bytes: int, _total_bytes: int, free_bytes: int) -> None:
    """torch's observer: logs what is cached, unless the latest line was about the same."""
    global _latest
    try:
        found = cached_bytes(device)
        if found and found != _latest:
            _latest = found
            logs.log(logging.WARNING, "%s", _sentence(device, wanted_bytes, free_bytes, found))
    except Exception as error:  # torch's own error is the one to raise
        logs.logger.debug("what tags cache is not known: %r", error)


def _sentence(device: int, wanted_bytes: int, free_bytes: int, found: dict[str, int]) -> str:
    names = ", ".join(map(repr, found)) if len(found) <= _MOST_TAGS else ""
    return (
        f"torch found no room for {format_size(wanted_bytes)} on device {device} ({format_size(free_bytes)} free), "
        f"while the pools of {len(found)} tag{'s' * (len(found) > 1)} cache {format_size(sum(found.values()))} that no "
        f"tensor uses: saver.trim({names}) gives it back"
    )
