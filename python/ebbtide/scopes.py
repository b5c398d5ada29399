"""`with` blocks whose beginning and end are long: `_core.Scope`, which sees to it that an interrupt leaves no half.

A subclass says what happens in `_open` and `_close`:
- `_open` may be cut short anywhere. What it does is recorded before it is done, or in the same call into C.
- `_close` ends what `_open` has left, however much that is. An interrupt may cut it short anywhere; it is then called
  again, so each step of it may be done twice.
- `_close` returns an error of its own (or None): what it raises counts as an interrupt. `_failure` is the error that
  the block ended with, None where it ended well.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ebbtide import _core

_P = ParamSpec("_P")
_R = TypeVar("_R")


class DecoratingScope(_core.Scope):
    """A scope that is also a decorator, as those of `contextlib.contextmanager` are: each call has one of its own."""

    def _again(self) -> "DecoratingScope":
        """Another one with the same arguments."""
        raise NotImplementedError

    def __call__(self, function: Callable[_P, _R]) -> Callable[_P, _R]:
        """Decorates a function, so that it runs inside."""

        @functools.wraps(function)
        def inside(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with self._again():
                return function(*args, **kwargs)

        return inside
