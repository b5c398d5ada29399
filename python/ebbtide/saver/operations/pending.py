"""Resumes whose bytes are still on their way: `saver.resume(wait=False)`.

A kernel that touches bytes too early reads stale memory. So the code that launches kernels waits: for all bytes (as
`resume` does by default), or for those that the caller names.

The stream waits on the device, not the thread. Everything is queued before the resume returns. So it continues whatever
the driver waits for, such as the load of a kernel at its first launch, or cudaFree.
"""

import contextlib
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.locks import make_lock
from ebbtide.processes import handing, lent
from ebbtide.saver.operations.hooked_operation import (
    Action,
    HookedOperation,
    calls_after,
    is_left_to_do,
    run_hooks_after_failure,
)
from ebbtide.saver.pools import bypass
from ebbtide.saver.state import hooks
from ebbtide.saver.state.known_tags import allocations_of
from ebbtide.saver.telling.log_lines import log_report
from ebbtide.saver.telling.watch import settle_pending, watch_pending
from ebbtide.saver.tensors.ranges import ranges_of
from ebbtide.saver.values.reports import Report
from ebbtide.saver.values.segments import Range

if TYPE_CHECKING:
    import torch


class Pending:
    """A resume under way. Also a context manager, which waits at its end.

        with saver.resume("weights", wait=False) as pending:
            print(pending.ready(model.weight))

    It may be dropped: the resume continues, and the process does not end before it is over.
    """

    def __init__(self, core: "_core.Pending | None" = None) -> None:
        self._core = core
        self._names: list[str] = []
        self._pauses: dict[Action, int] = {}  # how often the tags were paused, by the actions whose hooks are to run
        self._calls: list[hooks.Call] = []
        self._lock = make_lock()
        self._is_waited_for = False

    def _follow(
        self, core: "_core.Pending", names: list[str], hooked: HookedOperation | None, hold_stream: bool
    ) -> None:
        """Stands for a resume that has begun, and takes over its after-hooks. Where there are no streams, it returns
        once the bytes have arrived."""
        self._core, self._names = core, names
        # Read while the resume holds the tags or has just let go: a pause that waited for it must count as a later one.
        self._pauses = {action: _core.pause_count(action[1]) for action in (hooked.announced if hooked else ())}
        bypass.close_when_over(names, core)
        watch_pending(core, names)
        if not _has_streams():
            _wait_quietly(core)
        elif hold_stream:
            try:
                self.stream_wait()
            except Error:  # no work runs ahead of the bytes, because this thread waits
                _wait_quietly(core)
        if hooked is not None:
            hooked.hand_over()

    @property
    def done(self) -> bool:
        """Whether the resume is over, successful or not: `wait` would return at once."""
        return self._core is None or self._core.is_over()

    def wait(self) -> Report:
        """Waits for all bytes. The first call that succeeds runs the "after_resume" hooks.

        Hooks of a tag that was paused again meanwhile do not run: that pause has run its own.

        Returns:
            The Report, each time.

        Raises:
            StoreError, DriverError: the copying failed; each time. Every byte with a backup is safe, and pause or
                resume of the tags finishes.
        """
        errors: list[Exception] = []
        with self._lock:
            try:
                report = self._wait_for_core()
            except Error:
                left = self._left_to_do()
                self._pauses = {}
                run_hooks_after_failure(left)
                raise
            if is_first := not self._is_waited_for:
                bypass.close_if_resident(self._names)
                lent.give_back(waits=True)
                handing.release_unneeded()
                self._calls = calls_after(self._current())
                self._is_waited_for = True
            hooks.run_all(self._calls, errors)
        if is_first and self._core is not None:
            log_report(report, self._names)
        if errors:
            raise errors[0]
        return report

    def _left_to_do(self) -> list[Action]:
        """Those of them that did not happen. Another call has finished the others, and run their hooks."""
        infos = {tag: _core.query_tag(tag) for _, tag in self._pauses}
        return [(kind, tag) for kind, tag in self._current() if (info := infos[tag]) and is_left_to_do(kind, info)]

    def _current(self) -> list[Action]:
        """Of the actions whose hooks are to run, those of tags that were not paused again meanwhile: such a pause and
        its resume have run their own hooks."""
        return [action for action, count in self._pauses.items() if _core.pause_count(action[1]) == count]

    def _wait_for_core(self) -> Report:
        try:
            return self._check()
        finally:
            if self.done and self._core is not None:
                settle_pending(self._core)

    def _check(self) -> Report:
        return Report("resume") if self._core is None else Report.from_core(self._core.wait())

    def ready(self, tensor: "torch.Tensor") -> bool:
        """Whether the bytes of `tensor` have arrived, or the resume is over (also if it failed: `wait` raises the
        error).

        True for tensors that are not part of the resume. This only asks; a kernel launched after True may use the
        bytes.

        Raises:
            TypeError: no tensor, nor anything that holds some.
        """
        reached = [one for _, one in ranges_of(tensor, "ready")]
        return self._core is None or all(self._core.is_ready(*one) for one in reached)

    def stream_wait(self, stream: "torch.cuda.Stream | None" = None, tensors: Any = None) -> None:
        """Makes a stream wait for bytes, on the device: work queued on it afterwards finds them in place.

        Where the device has no such waits, the calling thread waits. If the resume fails, the stream continues, and
        `wait` raises the error.

        Args:
            stream: a torch.cuda.Stream. None means this thread's current stream of each device concerned.
            tensors: a tensor, a module (its parameters and buffers), an order of them (`saver.order`), or a list of
                these; None: everything.

        Raises:
            TypeError: tensors of another type.
            StateError: the stream captures. Wait for the resume before the capture begins.
        """
        reached = None if tensors is None else ranges_of(tensors, "stream_wait")
        if self._core is None or self._core.is_over():
            return
        if stream is not None:
            self._let_wait(stream, None if reached is None else [one for _, one in reached])
            return
        import torch

        if reached is None:
            devices = {info.device for info in allocations_of(self._names)}
        else:
            devices = {device for device, _ in reached}
        for device in devices:
            wanted = None if reached is None else [one for at, one in reached if at == device]
            self._let_wait(torch.cuda.current_stream(device), wanted)

    def _let_wait(self, stream: "torch.cuda.Stream", ranges: list[Range] | None) -> None:
        assert self._core is not None
        if ranges is None or ranges:  # to the core, none means all
            self._core.stream_wait(stream.device.index, stream.cuda_stream, ranges or [])

    def attach(self, module: "torch.nn.Module") -> "Attachment":
        """Before each submodule's forward, the current stream waits for that submodule's own parameters and buffers: a
        forward pass begins while the later layers are still on their way. For `resume(..., wait=False,
        hold_stream=False, order=module)`.

        The hooks are removed when the resume is over, or by `remove()` of the returned object. If the resume has
        failed, the forward raises its error. Where a forward reads another module's parameters (tied weights,
        functional calls), the caller must wait for them. torch's own MultiheadAttention and TransformerEncoderLayer
        are handled. A compiled module is not supported: use `stream_wait` before the call.

        Raises:
            TypeError: not a module.
        """
        return Attachment(self, module)

    def __enter__(self) -> "Pending":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
            return
        with contextlib.suppress(Exception):  # the caller's own error is the one to raise
            self.wait()

    def __repr__(self) -> str:
        return f"<saver.Pending, {'over' if self.done else 'under way'}>"


class Attachment:
    """The hooks of one `Pending.attach`: each layer's forward waits for the bytes of that layer."""

    def __init__(self, pending: Pending, module: "torch.nn.Module") -> None:
        import torch

        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"attach takes a torch.nn.Module, not {type(module).__name__}")
        self._pending = pending
        self._handles: list[Any] = []
        if pending.done:
            pending._check()
            return
        for part in module.modules():
            if _tensors_read_by(part):
                # In front of other hooks, which may read parameters (weight_norm, say).
                self._handles.append(part.register_forward_pre_hook(self._before_forward, prepend=True))

    def remove(self) -> None:
        """Removes the hooks. A second call does nothing."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _before_forward(self, module: "torch.nn.Module", _arguments: Any) -> None:
        if self._pending.done:
            self.remove()
            self._pending._check()
            return
        self._pending.stream_wait(tensors=_tensors_read_by(module))


def _tensors_read_by(module: "torch.nn.Module") -> "list[torch.Tensor]":
    import torch

    # The forward of these reads parameters of inner modules without calling the modules.
    is_deep = isinstance(module, torch.nn.MultiheadAttention | torch.nn.TransformerEncoderLayer)
    return [*module.parameters(recurse=is_deep), *module.buffers(recurse=is_deep)]


def _wait_quietly(core: "_core.Pending") -> None:
    with contextlib.suppress(Error):  # `Pending.wait` raises it each time
        core.wait()
    settle_pending(core)


def _has_streams() -> bool:
    torch = sys.modules.get("torch")
    return _core.driver_name() in ("cuda", "hip") and torch is not None and torch.cuda.is_initialized()
