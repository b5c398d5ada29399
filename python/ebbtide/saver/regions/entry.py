"""The preparation of a region before it is entered.

Everything here prepares a `_core.Frame`, which owns its leases, and may be interrupted anywhere. C closes the frame if
the preparation fails, and otherwise shows it to torch in one step (csrc/bindings/scopes.cpp).
"""

import contextlib
import functools
import logging
from collections.abc import Sequence
from typing import NamedTuple

from ebbtide import _core
from ebbtide.errors import Error, StateError
from ebbtide.processes import lent
from ebbtide.saver.check import enabling
from ebbtide.saver.pools import backends
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool, holder_name, registry
from ebbtide.saver.reclaim import spilled, torch_cache
from ebbtide.saver.reclaim.look import Look
from ebbtide.saver.regions import startup
from ebbtide.saver.values.arguments import NO_OVERFLOW_CODE

_logger = logging.getLogger(__name__)


class RegionPolicy(NamedTuple):
    """The policy of a region. `backup` and `overflow` are core codes."""

    tag: str
    backup: int
    retain: bool
    overflow: int = NO_OVERFLOW_CODE
    is_exportable: bool = False


def prepare_region(
    frame: "_core.Frame", policy: RegionPolicy, takes_all_threads: bool, holder: str | None = None
) -> bool:
    """Fills the frame with a lease on the tag and a pool of it for each device; False where ebbtide is off.

    Args:
        holder: the name of the lease's holder in errors; None: this thread.

    Raises:
        StateError: this process is a forked child; also errors of `startup.backend`.
        OutOfMemoryError: the trimmed memory of the pools does not fit on the device.
        StoreError: nor on the host, where some of it lay.
    """
    if backends.is_forked_child():
        raise StateError(
            "this process is a fork of one that used ebbtide, and a GPU does not survive a fork: "
            "start it with the spawn method"
        )
    backend = startup.backend()
    if backend is None:
        return False
    enabling.enable_if_asked()
    overflows = policy.overflow != NO_OVERFLOW_CODE
    flushes_first = overflows and backend.flushes_first
    keys = [
        PoolKey(policy.tag, policy.backup, device, policy.retain, policy.overflow, flushes_first, policy.is_exportable)
        for device in backend.devices()
    ]
    if policy.is_exportable:
        with contextlib.suppress(StateError):  # a line has said so
            lent.listen()
    for key in keys:
        registry.slot(key)
    if overflows:
        frame.after = functools.partial(_prefer_device, policy.tag)
        _prefer_device(policy.tag)
    if backend.one_thread_only:
        frame.refusal_beside = (
            "with torch before 2.8, regions of two threads at once would take each other's tensors: "
            "open one at a time, or upgrade torch"
        )
    frame.takes_all_threads = takes_all_threads
    frame.beats_all = backend.inner_beats_all
    lease = frame.open_lease(policy.tag, holder or holder_name())
    frame.tag_thread(policy.tag, policy.backup, policy.retain)
    if lease.is_away:
        Look([policy.tag]).release_dead()
    reaches_all_threads = takes_all_threads or backend.one_thread_only
    pools = [registry.take(backend, key, lease, takes_all_threads=reaches_all_threads) for key in keys]
    restore_trimmed(policy.tag, pools)
    for pool in pools:
        for use in backend.uses(pool.handle, takes_all_threads):
            frame.add_use(*use)
    return True


def restore_trimmed(tag: str, pools: Sequence[RegionPool]) -> None:
    """Brings back the memory that was trimmed from these pools of the tag, all of it or nothing.

    Raises:
        OutOfMemoryError: there is too little room.
    """
    wanted = set().union(*(pool.trimmed for pool in pools))
    if not wanted:
        return
    # torch may have freed a segment since. Its address may belong to another allocation by now.
    trimmed = [info.address for info in _core.allocations(tag) if info.is_trimmed and info.address in wanted]
    if trimmed:
        torch_cache.claim_with_retries(lambda: _core.resume([tag], addresses=trimmed))
    for pool in pools:
        pool.trimmed.clear()


def _prefer_device(tag: str) -> None:
    # Memory from an earlier spike that torch would hand out again, although the device has room by now.
    try:
        spilled.prefer_device(tag)
    except (Error, RuntimeError) as error:  # torch raises RuntimeErrors: for a broken device, say
        _logger.debug("free memory that has spilled stays where it is: %r", error)
