"""Makes CUDA graph captures known to ebbtide, whoever asks for them.

Synchronising a context breaks every capture that is under way in it, in any thread and mode, and each pause and
resume synchronises. So torch's own CUDAGraph tells the core where a capture begins and ends: an operation in between
is a StateError, and the capture stays whole. Captures that other libraries make past torch are not seen.

A capture that fails is not over for torch's allocator, which then gives nothing back of what it caches, for ever: it
is told here.

For its length, a capture also leaves the regions of its thread: what a graph captures belongs to the graph's pool,
and torch's random generators make state at the first capture that lives as long as they do.
"""

import contextlib
import functools
import weakref
from typing import Any

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.saver.pools import ordinary_memory, region_pools, workspaces
from ebbtide.torch_support import torch_names

_lock = make_lock()
_installed = False
_open: "dict[int, _Capture]" = {}
_tagged: dict[tuple[int, int], tuple[str, region_pools.RegionPool]] = {}


class _Capture:
    """One capture: counted in the core, its tag leased if its pool is one of ours, its thread outside all regions. All
    of it is one frame, so that it ends in one step."""

    def __init__(self, graph: Any, pool_id: Any, allocator: "_TorchAllocator") -> None:
        self._key = id(graph)
        self._pool_id = pool_id
        self._frame = _core.Frame()
        self._guard: Any = None
        self.allocator = allocator

    @property
    def is_open(self) -> bool:
        return not self._frame.is_closed

    def begin(self, graph: Any) -> None:
        """May be cut short anywhere: then `end` undoes it."""
        known = _tagged.get(tuple(self._pool_id))
        if known is not None:
            _lease_pool(self._frame, *known)
        workspaces.clear()
        region_pools.registry.begin_capture(self._frame, tuple(self._pool_id))
        ordinary_memory.prepare_ordinary(self._frame)
        for use in () if known is None else known[1].handle.activation():
            self._frame.add_use(*use)
        # A graph that is dropped without capture_end would leave the count open for ever.
        self._guard = weakref.finalize(graph, self.end)
        self._guard.atexit = False
        _open[self._key] = self
        self._frame.push()

    def forget(self) -> None:
        """Tells torch's allocator that this is over."""
        self.allocator.forget(self._pool_id)

    def end(self) -> None:
        """Undoes what was done. Twice does nothing."""
        self._frame.close()
        if _open.get(self._key) is self:
            del _open[self._key]
        if self._guard is not None:
            self._guard.detach()


class _Begin(_core.Scope):
    """Around torch's own begin. What it leaves where it was interrupted is asked of torch."""

    def __init__(self, capture: _Capture, graph: Any, owns_pool: bool) -> None:
        self._capture, self._graph, self._owns_pool = capture, graph, owns_pool

    def _open(self) -> None:
        self._capture.begin(self._graph)

    def _close(self) -> None:
        if self._failure is None or (self._capture.is_open and _is_under_way(self._capture)):
            return
        if self._owns_pool:  # one that was given may be in use by others
            self._capture.forget()
        self._capture.end()


class _End(_core.Scope):
    """Around torch's own end. Where that fails and the stream still captures, it may be asked for again."""

    def __init__(self, capture: _Capture) -> None:
        self._capture = capture

    def _open(self) -> None:
        """Nothing before."""

    def _close(self) -> None:
        if self._failure is not None:
            if _is_under_way(self._capture):
                return
            self._capture.forget()
        self._capture.end()


def _is_under_way(capture: _Capture) -> bool:
    try:
        return capture.allocator.is_capturing()
    except RuntimeError:  # a device that is broken, say: torch says no more of it
        return False


def _lease_pool(frame: "_core.Frame", tag: str, pool: region_pools.RegionPool) -> None:
    lease = frame.open_lease(tag, f"a capture in {region_pools.holder_name()}")
    if not region_pools.may_enter(pool.epoch, lease.epoch, lease.is_away):
        raise StateError(f"the graph pool of tag {tag!r} is paused: resume it before capturing into it")


def current(graph: Any) -> "_Capture | None":
    """The capture into this graph that is under way."""
    capture = _open.get(id(graph))
    return capture if capture is not None and capture.is_open else None


def name_pool(pool_id: tuple[int, int], tag: str, pool: region_pools.RegionPool) -> None:
    """Captures into this pool lease `tag`."""
    _tagged[pool_id] = (tag, pool)


def is_capturing() -> bool:
    """Whether any capture that ebbtide knows of is under way."""
    return any(capture.is_open for capture in list(_open.values()))


class _TorchAllocator:
    """torch's CUDA allocator, as far as it knows of one capture, which begins on the current stream."""

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.current_stream()
        self._end = torch_names.end_allocate()
        self._release = torch_names.find("_C._cuda_releasePool")

    def make_pool(self) -> Any:
        """An id for a capture that was given none: torch tells its own only of captures that went well."""
        import torch

        return torch.cuda.graph_pool_handle()

    def is_capturing(self) -> bool:
        """Whether the stream is in a capture, be it a broken one."""
        import torch

        with torch.cuda.stream(self._stream):
            return torch.cuda.is_current_stream_capturing()

    def forget(self, pool_id: Any) -> None:
        """Ends the use of the pool that the capture began, if torch has not."""
        with contextlib.suppress(RuntimeError):  # it has
            arguments = (self._stream.device_index, pool_id)
            _core.call_together((self._end, arguments), (self._release, arguments))


def install() -> None:
    """Wraps torch.cuda.CUDAGraph.capture_begin and capture_end, once."""
    global _installed
    import torch

    with _lock:
        if not _installed:
            _wrap(torch.cuda.CUDAGraph, _TorchAllocator)
            _installed = True


def _wrap(graph_class: Any, make_allocator: Any) -> None:
    begin, end = graph_class.capture_begin, graph_class.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current(self) is not None:  # torch refuses this with its own words
            return begin(self, *args, **kwargs)
        allocator = make_allocator()
        given, *rest = args or (kwargs.pop("pool", None),)
        pool_id = allocator.make_pool() if given is None else given
        with _Begin(_Capture(self, pool_id, allocator), self, given is None):
            return begin(self, pool_id, *rest, **kwargs)

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture = current(self)
        if capture is None:
            return end(self, *args, **kwargs)
        with _End(capture):
            return end(self, *args, **kwargs)

    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end
