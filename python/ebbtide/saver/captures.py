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
import threading
import weakref
from typing import Any

from ebbtide import _core, torch_names
from ebbtide.errors import StateError
from ebbtide.saver import frames, leases, workspaces

_lock = threading.RLock()
_installed = False
_open: "dict[int, _Capture]" = {}
_tagged: dict[tuple[int, int], tuple[str, leases.LentPool]] = {}


class _Capture:
    """One capture: counted in the core, its tag leased if its pool is one of ours, its thread outside all regions."""

    def __init__(self, graph: Any, pool_id: Any, allocator: "_TorchAllocator") -> None:
        self._key = id(graph)
        self._pool_id = pool_id
        self._allocator = allocator
        self._stack = frames.this_thread()
        self._frame: frames.Frame | None = None
        known = _tagged.get(tuple(pool_id))
        self._lease = None if known is None else _lease_pool(*known)
        self._is_counted = False
        self._active: Any = None
        self._guard: Any = None
        try:
            workspaces.forget()
            _core.begin_capture()
            self._is_counted = True
            leases.shelf.begin_capture(tuple(pool_id))
            frame = frames.OrdinaryFrame(self)
            self._stack.push(frame)
            self._frame = frame
            self._active = None if known is None else known[1].pool.make_active()
            # A graph that is dropped without capture_end would leave the count open for ever.
            self._guard = weakref.finalize(graph, self.end)
            self._guard.atexit = False
            _open[self._key] = self
        except BaseException:
            self.end()
            raise

    def end_failed(self) -> None:
        """After torch's own end has failed. Nothing where the stream still captures: it may be asked for again."""
        try:
            if not self._allocator.is_capturing():
                self.forget()
                self.end()
        except BaseException:
            self.end()
            raise

    def forget(self) -> None:
        """Tells torch's allocator that this is over."""
        self._allocator.forget(self._pool_id)

    def end(self) -> None:
        """Undoes what was done, once."""
        if self._guard is not None:
            self._guard.detach()
        if _open.get(self._key) is self:
            del _open[self._key]
        self._active = None
        frame, self._frame = self._frame, None
        lease, self._lease = self._lease, None
        is_counted, self._is_counted = self._is_counted, False
        try:
            if frame is not None:
                self._stack.discard(frame)
        finally:
            if is_counted:
                leases.shelf.end_capture()
                _core.end_capture()
            if lease is not None:
                _core.close_lease(lease.id)


def _lease_pool(tag: str, lent: leases.LentPool) -> "_core.Lease":
    lease = _core.open_lease(tag, f"a capture in {leases.holder_name()}")
    if not leases.may_enter(lent.epoch, lease.epoch, lease.is_away):
        _core.close_lease(lease.id)
        raise StateError(f"the graph pool of tag {tag!r} is paused: resume it before capturing into it")
    return lease


def name_pool(pool_id: tuple[int, int], tag: str, lent: leases.LentPool) -> None:
    """Captures into this pool lease `tag`."""
    _tagged[pool_id] = (tag, lent)


def is_capturing() -> bool:
    """Whether any capture that ebbtide knows of is under way."""
    return bool(_open)


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
            self._end(self._stream.device_index, pool_id)
            self._release(self._stream.device_index, pool_id)


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
        if id(self) in _open:  # torch refuses this with its own words
            return begin(self, *args, **kwargs)
        allocator = make_allocator()
        given, *rest = args or (kwargs.pop("pool", None),)
        pool_id = allocator.make_pool() if given is None else given
        capture = _Capture(self, pool_id, allocator)
        try:
            return begin(self, pool_id, *rest, **kwargs)
        except BaseException:
            if given is None:  # one that was given may be in use by others
                capture.forget()
            capture.end()
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        capture = _open.get(id(self))
        try:
            result = end(self, *args, **kwargs)
        except BaseException:
            if capture is not None:
                capture.end_failed()
            raise
        if capture is not None:
            capture.end()
        return result

    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end
