"""CUDA graphs whose memory can be paused. Captures get pools of their own, which are never leased to regions.

Each graph of `cuda_graph` has its own pool, as with `torch.cuda.graph`. Graphs that share a pool must be replayed in
the order of their captures, which is up to the caller (`graph_pool`). The pool of a graph that is gone is reused.
"""

import weakref
from dataclasses import dataclass
from typing import Any

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.saver.pools import backends, captures, stand_ins
from ebbtide.saver.pools.region_pools import PoolKey, RegionPool, holder_name, may_enter, registry
from ebbtide.saver.regions import startup
from ebbtide.saver.regions.region import prepare_tagged
from ebbtide.saver.state import program
from ebbtide.saver.values.arguments import BackupName, backup_code, check_tag
from ebbtide.scopes import DecoratingScope
from ebbtide.torch_support import expandable_segments


@dataclass(eq=False)
class _GraphPool:
    region_pool: RegionPool
    graph: "weakref.ref[Any] | None"  # None: a shared pool
    replaced: Any = None  # the id of the caller's pool that a shared one takes the place of; None: that of `graph_pool`

    def serves(self, graph: Any) -> bool:
        """Whether this pool belongs to `graph`, or to a graph that is gone."""
        return self.graph is not None and self.graph() in (None, graph)


_lock = make_lock()
_pools: dict[PoolKey, list[_GraphPool]] = {}


def _cuda_backend(what: str) -> backends.PoolBackend | None:
    backend = startup.backend()
    captures.refuse_with_hip()
    if backend is not None and backend.device_type != "cuda":
        raise StateError(f"{what} needs a GPU: CPU operations cannot be captured")
    return backend


def _make(backend: backends.PoolBackend, key: PoolKey, epoch: int, graph: Any) -> _GraphPool:
    region_pool = RegionPool(backend.make(registry.slot(key), key.device, key.tag), key.device, epoch, is_captured=True)
    captures.name_pool(tuple(region_pool.handle.id), key.tag, region_pool)
    return _GraphPool(region_pool, None if graph is None else weakref.ref(graph))


def _pool_for(backend: backends.PoolBackend, key: PoolKey, graph: Any, lease: "_core.HeldLease") -> _GraphPool:
    with _lock:
        known = (pool for pool in _pools.get(key, ()) if pool.serves(graph))
        pool = next((pool for pool in known if may_enter(pool.region_pool.epoch, lease.epoch, lease.is_away)), None)
        if pool is not None:
            pool.graph = weakref.ref(graph)
            return pool
    made = _make(backend, key, lease.epoch, graph)  # outside our lock, since it calls torch
    with _lock:
        _pools.setdefault(key, []).append(made)
    return made


class GraphCapture(DecoratingScope):
    """The context manager that `saver.cuda_graph` returns."""

    def __init__(
        self, graph: Any, tag: str, backup: BackupName | None, arguments: dict[str, Any], replaced: Any = None
    ) -> None:
        self._graph, self._tag, self._backup, self._arguments = graph, tag, backup, arguments
        self._replaced = replaced
        self._frame = _core.Frame()
        self._tagging: _core.Frame | None = None  # gives the thread's own allocations the tag
        self._inner: Any = None  # torch's own context manager, set before it is entered
        self._stream: Any = None  # the current stream before it
        self._has_entered = self._has_left = False

    def _again(self) -> "GraphCapture":
        return GraphCapture(self._graph, self._tag, self._backup, self._arguments, self._replaced)

    def _open(self) -> None:
        key_tag, code = check_tag(self._tag), backup_code(self._backup)
        if "pool" in self._arguments:
            raise TypeError(
                "cuda_graph brings its own pool; to share one, capture with "
                "torch.cuda.graph(g, pool=saver.graph_pool(tag))"
            )
        backend = _cuda_backend("saver.cuda_graph")
        import torch

        arguments = self._arguments
        if backend is not None:
            key = PoolKey(key_tag, code, torch.cuda.current_device())
            arguments = {**arguments, "pool": self._choose_pool(backend, key)}
        elif self._replaced is not None:
            arguments = {**arguments, "pool": self._replaced}
        inner = torch.cuda.graph(self._graph, **arguments)
        self._stream = torch.cuda.current_stream()
        self._inner = inner
        inner.__enter__()
        self._has_entered = True
        if self._tagging is not None:
            self._tagging.push()

    def _choose_pool(self, backend: backends.PoolBackend, key: PoolKey) -> Any:
        """The id of the pool that the capture goes into."""
        if captures.is_named(self._replaced):
            return self._replaced
        if self._replaced is None:
            registry.slot(key)
            lease = self._frame.open_lease(key.tag, f"a capture in {holder_name()}")
            return _pool_for(backend, key, self._graph, lease).region_pool.handle.id
        if program.has_hooks() and not expandable_segments.are_on():
            captures.warn_of_registrations()
            self._tagging = _core.Frame()
            prepare_tagged(self._tagging, key.tag, key.backup)
            return self._replaced
        ours = _shared(backend, key, self._replaced).region_pool.handle.id
        stand_ins.begin(self, key.device, self._replaced, ours)
        return ours

    def _close(self) -> Exception | None:
        """Runs torch's own end once. If an interrupt cut it short, runs the rest of it."""
        failure: Exception | None = None
        if self._tagging is not None:
            self._tagging.close()
        if self._inner is not None:
            is_first, self._has_left = not self._has_left, True
            kind = None if self._failure is None else type(self._failure)
            try:
                if is_first and (self._has_entered or captures.current(self._graph) is not None):
                    self._inner.__exit__(kind, self._failure, None)
                elif captures.current(self._graph) is not None:
                    self._graph.capture_end()
            except Exception as error:
                failure = error
            _set_stream(self._stream)
        stand_ins.end(self)
        self._frame.close()
        return failure


def _set_stream(stream: Any) -> None:
    import torch

    if torch.cuda.current_stream() != stream:
        torch.cuda.set_stream(stream)


def cuda_graph(graph: Any, tag: str = "graphs", *, backup: BackupName | None = "ram", **arguments: Any) -> GraphCapture:
    """`torch.cuda.graph`, with the graph's memory under a tag: pause it, resume it, replay. A context manager.

        with saver.cuda_graph(graph, tag="graphs"):
            y = model(x)

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
    return GraphCapture(graph, tag, backup, arguments)


def graph_pool(tag: str = "graphs", *, backup: BackupName | None = "ram") -> Any:
    """The id of the tag's shared graph pool on the current device: for torch.cuda.graph(pool=) and
    make_graphed_callables(pool=).

        with torch.cuda.graph(graph, pool=saver.graph_pool("graphs")):
            y = model(x)

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
    return _shared(backend, PoolKey(key_tag, code, torch.cuda.current_device())).region_pool.handle.id


def cuda_graph_in_place_of(
    pool: Any, graph: Any, tag: str, backup: BackupName | None, arguments: dict[str, Any]
) -> GraphCapture:
    """`cuda_graph` for callers that bring a pool of their own.

    Args:
        pool: the id of torch's that they give, or None. In a preloaded program the capture goes into this pool, and
            what it allocates has the tag. Elsewhere nothing of torch's own pool can be paused: the graphs of one tag
            and backup that are given the same id share a pool of ours, which stands in for it (`stand_ins`). A pool of
            ours is used as it is.
    """
    return GraphCapture(graph, tag, backup, arguments, None if pool is None else tuple(pool))


def _shared(backend: backends.PoolBackend, key: PoolKey, replaced: Any = None) -> _GraphPool:
    shared = _find_shared(key, replaced)
    if shared is None:
        registry.slot(key)
        with _core.Frame() as frame:
            made = _make(backend, key, frame.open_lease(key.tag, holder_name()).epoch, None)
        made.replaced = replaced
        with _lock:  # if another thread was faster, its pool is used, and ours stays empty
            shared = _find_shared(key, replaced)
            if shared is None:
                shared = made
                _pools.setdefault(key, []).append(made)
    return shared


def _find_shared(key: PoolKey, replaced: Any) -> _GraphPool | None:
    with _lock:
        pools = _pools.get(key, [])
        return next((pool for pool in pools if pool.graph is None and pool.replaced == replaced), None)
