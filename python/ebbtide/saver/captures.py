"""Makes CUDA graph captures known to ebbtide, whoever asks for them.

Synchronising a context breaks every capture that is under way in it, in any thread and mode, and each pause and
resume synchronises. So torch's own CUDAGraph tells the core where a capture begins and ends: an operation in between
is a StateError, and the capture stays whole. Captures that other libraries make past torch are not seen.

For its length, a capture also leaves the regions of its thread: what a graph captures belongs to the graph's pool,
and torch's random generators make state at the first capture that lives as long as they do.
"""

import functools
import threading
import weakref
from typing import Any

from ebbtide import _core
from ebbtide.errors import StateError
from ebbtide.saver import frames, leases, workspaces

_lock = threading.RLock()
_installed = False
_open: "dict[int, _Capture]" = {}
_tagged: dict[tuple[int, int], tuple[str, leases.LentPool]] = {}


class _Capture:
    """One capture: counted in the core, its tag leased if its pool is one of ours, its thread outside all regions."""

    def __init__(self, graph: Any, pool_id: Any) -> None:
        self._key = id(graph)
        self._stack = frames.this_thread()
        self._frame: frames.Frame | None = None
        known = _tagged.get(tuple(pool_id)) if pool_id is not None else None
        self._lease = None if known is None else _lease_pool(*known)
        self._is_counted = False
        self._active: Any = None
        self._guard: Any = None
        try:
            workspaces.forget()
            _core.begin_capture()
            self._is_counted = True
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


def install() -> None:
    """Wraps torch.cuda.CUDAGraph.capture_begin and capture_end, once."""
    global _installed
    import torch

    with _lock:
        if not _installed:
            _wrap(torch.cuda.CUDAGraph)
            _installed = True


def _wrap(graph_class: Any) -> None:
    begin, end = graph_class.capture_begin, graph_class.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _open:  # torch refuses this with its own words
            return begin(self, *args, **kwargs)
        capture = _Capture(self, args[0] if args else kwargs.get("pool"))
        try:
            return begin(self, *args, **kwargs)
        except BaseException:
            capture.end()
            raise

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return end(self, *args, **kwargs)
        finally:
            capture = _open.get(id(self))
            if capture is not None:
                capture.end()

    graph_class.capture_begin = capture_begin
    graph_class.capture_end = capture_end
