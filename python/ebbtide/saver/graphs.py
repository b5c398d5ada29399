"""CUDA graphs whose memory can be paused: captures go to pools of their own, never lent to regions.

Each graph of `cuda_graph` has a pool for itself, as with `torch.cuda.graph`: graphs that share a pool may only be
replayed in the order of their captures, which is the caller's to promise (`graph_pool`). A pool whose graph is gone
is used again.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver import captures, pools
from ebbtide.saver.leases import LentPool, PoolKey, holder_name, may_enter, shelf
from ebbtide.saver.names import BackupName, backup_code, check_tag


@dataclass(eq=False)
class _GraphPool:
    lent: LentPool
    graph: "weakref.ref[Any] | None"  # None: of graph_pool, shared by whom its id was given to

    def serves(self, graph: Any) -> bool:
        """Whether this pool is `graph`'s, or nobody's any more."""
        return self.graph is not None and self.graph() in (None, graph)


_lock = threading.RLock()
_pools: dict[PoolKey, list[_GraphPool]] = {}


def _cuda_backend(what: str) -> pools.PoolBackend | None:
    backend = pools.backend()
    if backend is not None and backend.device_type != "cuda":
        raise StateError(f"{what} needs a GPU: CPU operations cannot be captured")
    return backend


def _make(backend: pools.PoolBackend, key: PoolKey, epoch: int, graph: Any) -> _GraphPool:
    lent = LentPool(backend.make(shelf.slot(key), key.device, key.tag), key.device, epoch, is_captured=True)
    captures.name_pool(tuple(lent.pool.id), key.tag, lent)
    return _GraphPool(lent, None if graph is None else weakref.ref(graph))


def _pool_for(backend: pools.PoolBackend, key: PoolKey, graph: Any, lease: "_core.Lease") -> _GraphPool:
    with _lock:
        for pool in _pools.get(key, []):
            if pool.serves(graph) and may_enter(pool.lent.epoch, lease.epoch, lease.is_away):
                pool.graph = weakref.ref(graph)
                return pool
    made = _make(backend, key, lease.epoch, graph)  # calls torch: not under our lock
    with _lock:
        _pools.setdefault(key, []).append(made)
    return made


@contextmanager
def cuda_graph(
    graph: Any, tag: str = "graphs", *, backup: BackupName | None = "ram", **arguments: Any
) -> Iterator[None]:
    """`torch.cuda.graph`, with the graph's memory under a tag: pause it, resume it, replay.

    Args:
        graph: the torch.cuda.CUDAGraph to capture into.
        tag: as in `region`.
        backup: as in `region`. Graphs keep state that replays never write again, so None is only for graphs that you
            know to be free of it.
        arguments: torch.cuda.graph's other arguments (stream, capture_error_mode, ...), but not `pool`.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: no GPU, or a pause of the tag is asked for during the capture (raised there).
    """
    key_tag, code = check_tag(tag), backup_code(backup)
    if "pool" in arguments:
        raise TypeError(
            "cuda_graph brings its own pool; to share one, capture with torch.cuda.graph(g, pool=saver.graph_pool(tag))"
        )
    backend = _cuda_backend("saver.cuda_graph")
    import torch

    if backend is None:
        with torch.cuda.graph(graph, **arguments):
            yield
        return
    key = PoolKey(key_tag, code, torch.cuda.current_device())
    shelf.slot(key)
    lease = _core.open_lease(key_tag, f"a capture in {holder_name()}")
    try:
        pool = _pool_for(backend, key, graph, lease)
        with torch.cuda.graph(graph, pool=pool.lent.pool.id, **arguments):
            yield
    finally:
        _core.close_lease(lease.id)


def graph_pool(tag: str = "graphs", *, backup: BackupName | None = "ram") -> Any:
    """The id of the tag's shared graph pool on the current device: for torch.cuda.graph(pool=) and
    make_graphed_callables(pool=).

    The same id at every call. As torch says of shared pools: replay the graphs in the order of their captures, one at
    a time.

    Raises:
        TypeError, ValueError: malformed arguments.
        StateError: no GPU.
    """
    key_tag, code = check_tag(tag), backup_code(backup)
    backend = _cuda_backend("saver.graph_pool")
    import torch

    if backend is None:
        return torch.cuda.graph_pool_handle()
    key = PoolKey(key_tag, code, torch.cuda.current_device())
    shared = _shared_pool(key)
    if shared is None:
        shelf.slot(key)
        lease = _core.open_lease(key_tag, holder_name())
        try:
            made = _make(backend, key, lease.epoch, None)
        finally:
            _core.close_lease(lease.id)
        with _lock:  # another thread may have been faster: then its pool is the one, and ours stays empty
            shared = _shared_pool(key)
            if shared is None:
                shared = made
                _pools.setdefault(key, []).append(made)
    return shared.lent.pool.id


def _shared_pool(key: PoolKey) -> _GraphPool | None:
    with _lock:
        return next((pool for pool in _pools.get(key, []) if pool.graph is None), None)
