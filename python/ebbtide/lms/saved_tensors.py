"""autograd's hooks for saved tensors, in each thread that trains.

torch keeps these hooks by thread. The thread that enables LMS gets them, and so does each one that
`threading.Thread` starts while LMS is on. They go before their thread ends: torch would free them in the destructor of
a thread-local variable, which takes the GIL after `Thread.join` has returned. If the interpreter ends at that moment,
that ends the process.
"""

import sys
import threading
from typing import Any

from ebbtide.errors import StateError
from ebbtide.torch_support.torch_names import find

_hooks = threading.local()  # .installed: this thread's _Installed
_following: Any = None  # the extension whose hooks threads get that start now
_plain_start: Any = None  # what our Thread.start calls, while it is in place
_hooked_start: Any = None


class _Installed:
    """The hooks of one thread. They may lie below others, and they may not be open yet."""

    _thread: int | None = None  # whose hooks they are, from when they may be open until they are gone

    def __init__(self, extension: Any, hooks: Any) -> None:
        self._extension = extension
        self._hooks = hooks
        self._thread = threading.get_ident()

    def remove(self) -> bool:
        """Takes them away; False if others lie above them."""
        innermost = _innermost()
        if innermost is not None:  # otherwise they were never open
            pack = self._extension.pack
            if innermost[0] is not pack and innermost[0] != pack:
                return False
            self._hooks.__exit__(None, None, None)
        self._thread = None
        return True

    def __del__(self) -> None:
        """Runs when Python's part of the thread ends, before `Thread.join` returns. In a forked child, Python ends its
        parent's other threads in the only thread that there is, whose hooks are others."""
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            self.remove()


def install(extension: Any) -> None:
    """Hooks this thread; nothing if it has them already.

    Raises:
        StateError: torch has disabled such hooks here, as inside a transform of torch.func; or other hooks are open
            here, whose end would take ours away instead.
    """
    import torch

    if getattr(_hooks, "installed", None) is not None:
        return
    innermost = _innermost()
    hooks = torch.autograd.graph.saved_tensors_hooks(extension.pack, extension.unpack)
    if innermost is not None and innermost[0] == extension.pack:
        # Removed amid a backward, which brings the hooks of its thread back at its end.
        _hooks.installed = _Installed(extension, hooks)
        return
    if innermost is not None:
        raise StateError(
            "LMS can't be enabled inside other saved-tensor hooks (saved_tensors_hooks, save_on_cpu), whose end would "
            "take its hooks away: enable it outside"
        )
    # First: where an interrupt leaves it at this, `remove` finds that they are not open.
    _hooks.installed = _Installed(extension, hooks)
    try:
        hooks.__enter__()
    except RuntimeError as error:
        _hooks.installed = None
        raise StateError(f"LMS can't be enabled here: {error}") from error


def remove() -> None:
    """Takes this thread's hooks away. If others lie above them they stay, and leave every tensor where it is."""
    installed = getattr(_hooks, "installed", None)
    if installed is not None and installed.remove():
        _hooks.installed = None


def _innermost() -> Any:
    """The pair of hooks that torch uses in this thread, or None."""
    return find("_C._autograd._top_saved_tensors_default_hooks")(True)


def follow_threads(extension: Any) -> None:
    """Hooks the threads that start from now on."""
    global _following, _hooked_start, _plain_start
    _following = extension
    plain = threading.Thread.start
    if plain is _hooked_start:
        return

    def start(self: threading.Thread) -> None:
        run, own = self.run, vars(self).get("run")

        def unhook() -> None:
            if own is None:
                vars(self).pop("run", None)
            else:
                vars(self)["run"] = own

        def hooked_run() -> None:
            unhook()
            if _following is not None:
                install(_following)
            run()

        if _following is not None:
            vars(self)["run"] = hooked_run
        try:
            plain(self)
        except RuntimeError:  # it did not start. After an interrupt it may have, and finds what it is to run.
            unhook()
            raise

    _plain_start, _hooked_start = plain, start
    threading.Thread.start = start  # type: ignore[method-assign]


def leave_threads() -> None:
    """Ends `follow_threads`. Somebody else's change of `Thread.start` stays."""
    global _following
    _following = None
    if threading.Thread.start is _hooked_start:
        threading.Thread.start = _plain_start  # type: ignore[method-assign]
