"""Resumes whose bytes are still on their way: `saver.resume(wait=False)`.

A kernel that touches bytes too early reads stale memory. So whoever launches kernels waits: for all bytes (what
`resume` does by default), or for those that the caller names.

The stream waits on the device, not the thread. Everything is queued before the resume returns. So it continues whatever
the driver waits for, such as the load of a kernel at its first launch, or cudaFree.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ebbtide import _core
from ebbtide.errors import Error
from ebbtide.locks import make_lock
from ebbtide.saver.operations.hooked_operation import HookedOperation, WithoutHooks, run_hooks_after_failure, unfinished
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

    def __init__(
        self,
        core: "_core.Pending | None",
        find_devices: Callable[[], Iterable[int]] = tuple,
        after: Callable[[], list[tuple[Callable[[str], Any], str]]] | None = None,
        after_failure: Callable[[], None] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._core = core
        self._names = names
        self._find_devices = find_devices
        self._after = after
        self._calls: list[tuple[Callable[[str], Any], str]] = []
        self._after_failure = after_failure
        self._lock = make_lock()
        self._is_logged = core is None

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
        with self._lock:
            try:
                report = self._wait_for_core()
            except Error:
                failed, self._after_failure = self._after_failure, None
                if failed is not None:
                    failed()
                raise
            if self._after is not None:
                self._calls = self._after()
                self._after = None
            hooks.run_all(self._calls)
            is_first = not self._is_logged
            self._is_logged = True
        return log_report(report, self._names) if is_first else report

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
            tensors: a tensor, a module (its parameters and buffers), what `saver.order` made of them, or a list of
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

        devices = self._find_devices() if reached is None else dict.fromkeys(device for device, _ in reached)
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


def start(
    core: "_core.Pending", names: list[str], operation: HookedOperation | WithoutHooks, hold_stream: bool
) -> Pending:
    """The Pending of a resume that has begun. It takes over the after-hooks of `operation`.

    Where there are no streams, it returns once the bytes have arrived.
    """
    pauses = {tag: _core.pause_count(tag) for _, tags in operation.announced for tag in tags}

    def find_devices() -> Iterable[int]:
        return {info.device for info in allocations_of(names)}

    def after() -> list[tuple[Callable[[str], Any], str]]:
        bypass.close_if_resident(names)
        return hooks.calls(
            *((f"after_{kind}", [tag for tag in tags if is_current(tag)]) for kind, tags in operation.announced)
        )

    def after_failure() -> None:
        still = [(kind, [tag for tag in tags if is_current(tag)]) for kind, tags in operation.announced]
        run_hooks_after_failure(unfinished(still))

    def is_current(tag: str) -> bool:
        # If the tag was paused again meanwhile, that pause and its resume have run their own hooks.
        return _core.pause_count(tag) == pauses[tag]

    made = Pending(core, find_devices, after, after_failure, names)
    watch_pending(core, names)
    if not _has_streams():
        _wait_quietly(core)
    elif hold_stream:
        try:
            made.stream_wait()
        except Error:  # no work runs ahead of the bytes, because this thread waits
            _wait_quietly(core)
    operation.hand_over()
    return made


def _wait_quietly(core: "_core.Pending") -> None:
    with contextlib.suppress(Error):  # `Pending.wait` raises it each time
        core.wait()
    settle_pending(core)


def _has_streams() -> bool:
    torch = sys.modules.get("torch")
    return _core.driver_name() == "cuda" and torch is not None and torch.cuda.is_initialized()
