"""autograd's hooks for saved tensors, in each thread that trains.

torch keeps these hooks by thread. The thread that enables LMS gets them, and so does each one that
`threading.Thread` starts while LMS is on.
"""

import threading
from typing import Any

from ebbtide.errors import StateError
from ebbtide.torch_support.torch_names import find

_hooks = threading.local()  # .installed: the hooks of this thread, which may lie below others
_start = threading.Thread.start
_hooked_start: Any = None


def install(extension: Any) -> None:
    """Hooks this thread; nothing if it has them already.

    Raises:
        StateError: torch has disabled such hooks here, as inside a transform of torch.func; or other hooks are open
            here, whose end would take ours away instead.
    """
    import torch

    if getattr(_hooks, "installed", None) is not None:
        return
    if _innermost() is not None:
        raise StateError(
            "LMS can't be enabled inside other saved-tensor hooks (saved_tensors_hooks, save_on_cpu), whose end would "
            "take its hooks away: enable it outside"
        )
    hooks = torch.autograd.graph.saved_tensors_hooks(extension.pack, extension.unpack)
    _hooks.installed = hooks  # first: where an interrupt leaves it at this, `remove` finds that they are not open
    try:
        hooks.__enter__()
    except RuntimeError as error:
        _hooks.installed = None
        raise StateError(f"LMS can't be enabled here: {error}") from error


def remove(extension: Any) -> None:
    """Takes this thread's hooks away. If others lie above them they stay, and leave every tensor where it is."""
    hooks = getattr(_hooks, "installed", None)
    if hooks is None:
        return
    innermost = _innermost()
    if innermost is None:  # they were never open
        _hooks.installed = None
    elif innermost[0] is extension.pack or innermost[0] == extension.pack:
        hooks.__exit__(None, None, None)
        _hooks.installed = None


def _innermost() -> Any:
    """The pair of hooks that torch uses in this thread, or None."""
    return find("_C._autograd._top_saved_tensors_default_hooks")(True)


def follow_threads(extension: Any) -> None:
    """Hooks the threads that start from now on."""
    global _hooked_start

    def start(self: threading.Thread) -> None:
        run = self.run

        def hooked_run() -> None:
            del self.run  # type: ignore[method-assign]
            install(extension)
            run()

        self.run = hooked_run  # type: ignore[method-assign]
        try:
            _start(self)
        except BaseException:
            del self.run
            raise

    _hooked_start = start
    threading.Thread.start = start  # type: ignore[method-assign]


def leave_threads() -> None:
    """Ends `follow_threads`. Somebody else's change of `Thread.start` stays."""
    if threading.Thread.start is _hooked_start:
        threading.Thread.start = _start  # type: ignore[method-assign]
