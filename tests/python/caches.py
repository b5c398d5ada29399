"""Memory in torch's caches: what earlier tests left there, and a thread that comes in between."""

import contextlib
import gc

import torch
from ebbtide import _core
from ebbtide.saver.pools import backends


def release(saver):
    """Gives all of it back, that of pools which `saver.trim` does not know as well: a request that nothing can serve
    makes torch's allocator, and the simulated device's, empty every cache."""
    gc.collect()
    saver.trim()
    with saver.region("caches"), contextlib.suppress(RuntimeError):
        torch.empty(1 << 40, dtype=torch.uint8, device=saver.device)


def lease_at_the_next_look(monkeypatch, tag):
    """When torch is asked next for the segments of pools, a lease of the tag is opened first. Returns its frame."""
    backend, other = backends.existing_backend(), _core.Frame()
    look, seen = backend.segments_of, []

    def look_and_lease(pools):
        if not seen:
            other.open_lease(tag, "another thread")
        seen.append(pools)
        return look(pools)

    monkeypatch.setattr(backend, "segments_of", look_and_lease, raising=False)
    return other
