"""`with` blocks with a long beginning and end: `_core.Scope` ensures that an interrupt leaves nothing half done.

A subclass implements `_open` and `_close`:
- `_open` may be interrupted anywhere. Each step is recorded before it is done, or in the same call into C.
- `_close` undoes whatever `_open` has done so far. If an interrupt cuts it short, it is called again. So each of its
  steps must be safe to repeat.
- `_close` returns an error of its own, or None; an exception that it raises counts as an interrupt. `_failure` is the
  error that ended the block, or None. It is a GeneratorExit if the scope was dropped inside.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

from ebbtide import _core

_P = ParamSpec("_P")
_R = TypeVar("_R")


class DecoratingScope(_core.Scope):
    """A scope that is also a decorator, like those of `contextlib.contextmanager`: each call gets a fresh one."""

    def _again(self) -> "DecoratingScope":
        """A fresh scope with the same arguments."""
        raise NotImplementedError

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a function, so that it runs inside."""
        return run_inside(function, self._again)


def run_inside(function: Callable[_P, _R], enter: Callable[[], AbstractContextManager[Any]]) -> Callable[_P, _R]:
    """The function that runs `function` in `enter`'s result at each call."""

    @functools.wraps(function)
    def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with enter():
            return function(*args, **kwargs)

    return inside
