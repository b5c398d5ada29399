"""autograd's hooks for saved tensors, in each thread that trains.

torch keeps these hooks by thread. The thread that enables LMS gets them, and so does each one that
`threading.Thread` starts while LMS is on.
"""

import threading
from typing import Any

from ebbtide.errors import StateError

_hooks = threading.local()  # .installed: the hooks of this thread, which may lie below others
_start = threading.Thread.start


def install(extension: Any) -> None:
    """Hooks this thread; nothing if it has them already.

    Raises:
        StateError: torch has disabled such hooks here, as inside a transform of torch.func.
    """
    import torch

    if getattr(_hooks, "installed", None) is not None:
        return
    hooks = torch.autograd.graph.saved_tensors_hooks(extension.pack, extension.unpack)
    try:
        hooks.__enter__()
    except RuntimeError as error:
        raise StateError(f"LMS can't be enabled here: {error}") from error
    _hooks.installed = hooks


def remove(extension: Any) -> None:
    """Takes this thread's hooks away. If others lie above them they stay, and leave every tensor where it is."""
    hooks = getattr(_hooks, "installed", None)
    if hooks is None or not _are_innermost(extension):
        return
    _hooks.installed = None
    hooks.__exit__(None, None, None)


def _are_innermost(extension: Any) -> bool:
    import torch

    before = extension.pack_count()
    with torch.enable_grad():
        torch.ones(1, device="cpu", requires_grad=True).exp()  # saves its result
    return bool(extension.pack_count() > before)


def follow_threads(extension: Any) -> None:
    """Hooks the threads that start from now on."""

    def start(self: threading.Thread) -> None:
        run = self.run

        def hooked_run() -> None:
            install(extension)
            run()

        self.run = hooked_run  # type: ignore[method-assign]
        try:
            _start(self)
        except BaseException:
            del self.run
            raise

    threading.Thread.start = start  # type: ignore[method-assign]


def leave_threads() -> None:
    """Ends `follow_threads`."""
    threading.Thread.start = _start  # type: ignore[method-assign]
