"""One call of ebbtide in the walk: its permitted outcomes, and their effect on the model.

A call succeeds; or it is refused, and then has changed nothing; or it is hit midway (by a fault or Ctrl-C), and then
each memory that it concerned is whole somewhere.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from ebbtide import _core
from ebbtide.errors import Error, OutOfMemoryError, StateError, StoreError

from . import perturb
from .model import Failure, Memory, Model

REFUSALS = (StateError, OutOfMemoryError, StoreError, torch.OutOfMemoryError)
LIMITS_OF_HOST = ("host_limit", "host_margin", "pinned_limit", "disk_directory", "host_pool")


def no_effect(_: Any) -> None:
    """For calls that change nothing that the model knows."""


def changed_nothing(model: Model, before: dict[int, bool], what: str) -> None:
    """After a refusal, everything is where it was. The bytes are compared after each step anyway."""
    for number, was_away in before.items():
        memory = model.memories.get(number)
        if memory is not None and memory.is_away() != was_away:
            raise Failure(f"{what}, but memory {number} of {memory.tag!r} is {'back' if was_away else 'away'} now")


class Attempt:
    """A call and the knowledge of it beforehand.

    refuses: the class of error that the call must raise, or None. comes_first: errors that it may raise instead of
    that. may_fail: other errors that it may raise; such a call has changed nothing, unless is_doubtful_after says so.
    touched: the memories that the call moves. drops: those of them whose content it may drop.
    """

    def __init__(
        self,
        model: Model,
        call: Callable[[], Any],
        effect: Callable[[Any], None] = no_effect,
        *,
        trouble: list[Any] | None = None,
        refuses: type[BaseException] | None = None,
        comes_first: Callable[[BaseException], bool] = lambda error: False,
        may_fail: Callable[[BaseException], bool] = lambda error: False,
        touched: Iterable[Memory] = (),
        drops: Iterable[Memory] = (),
        is_doubtful_after: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model, self._call, self._effect = model, call, effect
        self._trouble, self._refuses, self._may_fail = trouble, refuses, comes_first if refuses else may_fail
        self._touched, self._drops = list(touched), list(drops)
        self._is_doubtful_after = is_doubtful_after

    def run(self) -> str:
        """Makes the call. Returns the outcome in one word.

        Raises:
            Failure: an outcome that the model does not allow.
        """
        before = {number: memory.is_away() for number, memory in self._model.memories.items() if memory.policy}
        befallen = perturb.Trouble()
        is_interrupted = False
        try:
            with perturb.befall(self._trouble) as befallen:
                result = self._call()
        except perturb.HookFailed:
            if befallen.is_before:
                changed_nothing(self._model, before, "a hook stopped it")
                return "stopped by a hook"
            self._effect(None)
            return "done, and a hook failed"
        except KeyboardInterrupt:
            if befallen.kind != "interrupt":
                raise
            is_interrupted = True
        except (Error, torch.OutOfMemoryError, MemoryError) as error:
            return self._judge(error, befallen, before)
        if is_interrupted:  # a resume in the background may be under way
            _core.wait_for_tags([])
            self._doubt()
            return "interrupted"
        if self._refuses is not None and befallen.kind != "fault":
            raise Failure(f"this should have been refused with a {self._refuses.__name__}")
        self._effect(result)
        return "done"

    def _judge(self, error: BaseException, befallen: perturb.Trouble, before: dict[int, bool]) -> str:
        name = type(error).__name__
        if befallen.kind == "fault":
            self._doubt()
            return f"failed: {name}"
        is_right = self._refuses is not None and isinstance(error, self._refuses)
        if not is_right and not self._may_fail(error):
            raise Failure(f"an error that nothing calls for: {name}: {error}") from error
        if self._is_doubtful_after():
            self._doubt()
            return f"failed: {name}"
        changed_nothing(self._model, before, f"refused ({name}: {error})")
        return f"refused: {name}"

    def _doubt(self) -> None:
        for memory in self._touched:
            self._model.doubt(memory, memory in self._drops)


def host_may_refuse(model: Model) -> Callable[[BaseException], bool]:
    """A StoreError is permitted where a limit of the host is set."""

    def may(error: BaseException) -> bool:
        return isinstance(error, StoreError) and any(name in model.limits for name in LIMITS_OF_HOST)

    return may
