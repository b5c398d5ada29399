"""Detects CUDA graph captures and reports them to the core.

Synchronising a context breaks every capture under way in it, in any thread and mode, and every pause and resume
synchronises. So torch's `CUDAGraph` tells the core when a capture begins and ends. An operation in between raises a
StateError and the capture stays whole. Captures that other libraries make without torch are not detected.

When a capture fails, torch's allocator does not notice that it is over, and would never again free its cache.
ebbtide tells it.

During a capture the thread is outside all regions: captured allocations belong to the graph's pool, and at the first
capture torch's random generators allocate state that lives as long as they do.
"""

import contextlib
import functools
import os
import warnings
import weakref
from typing import Any

from ebbtide import _core, driver_choice
from ebbtide.errors import StateError
from ebbtide.locks import make_lock
from ebbtide.saver.pools import ordinary_memory, region_pools, workspaces
from ebbtide.saver.state import program
from ebbtide.torch_support import torch_names
from ebbtide.torch_support.ranks import has_ranks

_lock = make_lock()
_installed = False
_has_warned = False
_open: "dict[int, _Capture]" = {}
_tagged: dict[tuple[int, int], tuple[str, region_pools.RegionPool]] = {}


class _Capture:
    """One capture: counted in the core, with a lease on its tag if the pool is one of ours, outside all regions.

    All of this is one frame, so that it ends in one step.
    """

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
        """Begins the capture. An interrupt may cut this short anywhere; `end` then undoes it."""
        known = _tagged.get(tuple(self._pool_id))
        if known is not None or program.own() is not None:
            warn_of_registrations()
        if known is not None:
            _lease_pool(self._frame, *known)
        workspaces.clear()
        region_pools.registry.begin_capture(self._frame, tuple(self._pool_id))
        ordinary_memory.prepare_ordinary(self._frame)
        for use in () if known is None else known[1].handle.activation():
            self._frame.add_use(*use)
        # Without this, a graph dropped before its capture_end would leave the count open for good.
        self._guard = weakref.finalize(graph, self.end)
        self._guard.atexit = False
        _open[self._key] = self
        self._frame.push()

    def forget(self) -> None:
        """Tells torch's allocator that the capture is over."""
        self.allocator.forget(self._pool_id)

    def end(self) -> None:
        """Undoes `begin`. A second call does nothing."""
        self._frame.close()
        if _open.get(self._key) is self:
            del _open[self._key]
        if self._guard is not None:
            self._guard.detach()


class _Boundary(_core.Scope):
    """Wraps torch's own begin or end of a capture. If that fails, torch is asked whether the stream captures: then the
    capture goes on, and the caller may try again.

    Args:
        graph: of a capture that begins; None: it ends.
    """

    def __init__(self, capture: _Capture, graph: Any = None, owns_pool: bool = True) -> None:
        self._capture, self._graph, self._owns_pool = capture, graph, owns_pool

    def _open(self) -> None:
        if self._graph is not None:
            self._capture.begin(self._graph)

    def _close(self) -> None:
        has_failed = self._failure is not None
        if (self._capture.is_open and _is_under_way(self._capture)) if has_failed else self._graph is not None:
            return
        if has_failed and self._owns_pool:  # a pool that the caller gave may be in use elsewhere
            self._capture.forget()
        self._capture.end()


def _is_under_way(capture: _Capture) -> bool:
    try:
        return capture.allocator.is_capturing()
    except RuntimeError:  # a broken device, say
        return False


def _lease_pool(frame: "_core.Frame", tag: str, pool: region_pools.RegionPool) -> None:
    lease = frame.open_lease(tag, f"a capture in {region_pools.holder_name()}")
    if not region_pools.may_enter(pool.epoch, lease.epoch, lease.is_away):
        raise StateError(f"the graph pool of tag {tag!r} is paused: resume it before capturing into it")


def current(graph: Any) -> "_Capture | None":
    """The capture into this graph that is under way, or None."""
    capture = _open.get(id(graph))
    return capture if capture is not None and capture.is_open else None


def name_pool(pool_id: tuple[int, int], tag: str, pool: region_pools.RegionPool) -> None:
    """From now on, captures into this pool take a lease on `tag`."""
    _tagged[pool_id] = (tag, pool)


def is_named(pool_id: Any) -> bool:
    """Whether this is the id of a pool of ours."""
    return pool_id in _tagged


def warn_of_registrations() -> None:
    """Warns once where NCCL would register the buffers of collectives in a capture whose memory a pause takes: a resume
    brings other physical memory to their addresses."""
    global _has_warned
    if _has_warned or os.environ.get("NCCL_GRAPH_REGISTER") == "0" or not has_ranks():
        return
    import torch

    if "nccl" in torch.distributed.get_backend_config():
        _has_warned = True
        warnings.warn(
            "a pause can take the memory of this CUDA graph, and NCCL registers the buffers of the collectives in it: "
            "after a resume a replay can hang. Set NCCL_GRAPH_REGISTER=0 before the process group is made",
            RuntimeWarning,
            stacklevel=2,
        )


def is_capturing() -> bool:
    """Whether any capture that ebbtide knows of is under way."""
    return bool(_open) and any(capture.is_open for capture in list(_open.values()))


class _TorchAllocator:
    """The part of torch's CUDA allocator that concerns one capture. The capture begins on the current stream."""

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.current_stream()
        self._end = torch_names.end_allocate()
        self._release = torch_names.find("_C._cuda_releasePool")

    def make_pool(self) -> Any:
        """A pool id for a capture that was given none. torch reveals its own choice only after a successful capture."""
        import torch

        return torch.cuda.graph_pool_handle()

    def is_capturing(self) -> bool:
        """Whether the stream is in a capture, valid or broken."""
        import torch

        with torch.cuda.stream(self._stream):
            return torch.cuda.is_current_stream_capturing()

    def forget(self, pool_id: Any) -> None:
        """Ends the use of the pool that the capture began, unless torch has done so."""
        with contextlib.suppress(RuntimeError):  # torch has done so
            arguments = (self._stream.device_index, pool_id)
            _core.call_together((self._end, arguments), (self._release, arguments))


def install() -> None:
    """Wraps `torch.cuda.CUDAGraph.capture_begin` and `capture_end`. Further calls do nothing."""
    global _installed
    import torch

    with _lock:
        if not _installed:
            _wrap(torch.cuda.CUDAGraph, _TorchAllocator)
            _installed = True


def refuse_with_hip() -> None:
    """Raises: StateError: the driver is HIP. Whether the memory of a graph may leave and return there is not known."""
    if driver_choice.is_hip():
        raise StateError(
            "graph captures do not work with HIP once there are regions: run without graphs (vLLM's enforce_eager, "
            "SGLang's --disable-cuda-graph), or capture before the first region"
        )


def _wrap(graph_class: Any, make_allocator: Any) -> None:
    begin, end = graph_class.capture_begin, graph_class.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current(self) is not None:  # torch refuses this itself
            return begin(self, *args, **kwargs)
        refuse_with_hip()
        allocator = make_allocator()
        given, *rest = args or (kwargs.pop("pool", None),)
        pool_id = allocator.make_pool() if given is None else given
        with _Boundary(_Capture(self, pool_id, allocator), self, given is None):
            return begin(self, pool_id, *rest, **kwargs)

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture = current(self)
        if capture is None:
            return end(self, *args, **kwargs)
        with _Boundary(capture):
            return end(self, *args, **kwargs)

    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end
