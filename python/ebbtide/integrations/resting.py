"""Tags that rest on the host while a trainer does something that does not need them.

The callbacks for `transformers` and `lightning` share it.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ebbtide import saver
from ebbtide.saver.values.arguments import BackupName, backup_code, check_tags

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


class Resting:
    """The tags of one trainer.

    Args:
        model_tag: the tag that the model's parameters, buffers and gradients move into; None leaves them alone.
        optimizer_tag: the same for the states of its optimizers.
        pause: the tags that rest. None: the optimizer's.
        backup: as in `saver.region`, but not None.

    Raises:
        TypeError, ValueError: malformed arguments.
    """

    def __init__(
        self, model_tag: str | None, optimizer_tag: str | None, pause: Sequence[str] | None, backup: BackupName
    ) -> None:
        check_tags(tuple(tag for tag in (model_tag, optimizer_tag) if tag is not None))
        if pause is None:
            if optimizer_tag is None:
                raise ValueError("without an optimizer_tag, pause names the tags that leave the device")
            pause = (optimizer_tag,)
        self._tags = check_tags((pause,) if isinstance(pause, str) else tuple(pause))
        if not self._tags:
            raise ValueError("pause names at least one tag")
        backup_code(backup)
        if backup is None:
            raise ValueError(
                f'backup must be "ram", "pinned" or "disk": without one, {" and ".join(self._tags)} would be '
                "zeros after a phase"
            )
        self._model_tag, self._optimizer_tag, self._backup = model_tag, optimizer_tag, backup
        self._away: list[str] = []  # paused here
        self._overdue: list[str] = []  # of these, the ones whose resume failed
        self._is_begun = False

    def adopt_model(self, model: "torch.nn.Module") -> None:
        """Moves the model into its tag."""
        if self._model_tag is not None:
            adopt(model, self._model_tag, self._backup)

    def begin(self, optimizers: Iterable[Any]) -> None:
        """The tags rest from now on, with the states that the optimizers have by now. Does nothing if they rest."""
        if not (self._is_begun and all(map(saver.is_paused, self._away))):
            self._take(optimizers)
            self._is_begun = True

    def end(self) -> None:
        """Brings back the tags that `begin` paused. Does nothing if none rests. After a failure, the next call
        continues."""
        self._bring_back(self._away)
        self._is_begun = False

    @contextlib.contextmanager
    def phase(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """A `with` in which the tags rest."""
        away_before = [tag for tag in self._away if saver.is_paused(tag)]
        try:
            self._take(optimizers)
            yield
        finally:
            self._bring_back([tag for tag in self._away if tag not in away_before])

    def _take(self, optimizers: Iterable[Any]) -> None:
        self._is_begun = False
        self._away = [tag for tag in self._away if saver.is_paused(tag)]  # `saver.resume` may have brought it back
        self._overdue = [tag for tag in self._overdue if tag in self._away]
        tag = self._optimizer_tag
        if tag is not None and not (tag in saver.tags() and saver.is_paused(tag)):
            for optimizer in optimizers:
                adopt(states_of(optimizer), tag, self._backup)
        known = saver.tags()
        leaving = [
            tag
            for tag in self._tags
            if tag in known and known[tag].resident_bytes
            if tag in self._away or not saver.is_paused(tag)  # a tag that the program has paused stays as it is
        ]
        self._away = list(dict.fromkeys([*self._away, *leaving]))  # before the pause, which may fail midway
        if leaving:
            saver.pause(*leaving)

    def _bring_back(self, tags: Iterable[str]) -> None:
        self._overdue = list(dict.fromkeys([*self._overdue, *tags]))
        if self._overdue:
            saver.resume(*self._overdue)
        self._away = [tag for tag in self._away if tag not in self._overdue]
        self._overdue = []


class RestingCallback:
    """The part of a trainer's callback that does not depend on the trainer."""

    _PHASES: tuple[str, ...]

    def __init__(
        self,
        model_tag: str | None = "model",
        optimizer_tag: str | None = "optimizer",
        *,
        pause: Sequence[str] | None = None,
        around: Sequence[str] | None = None,
        backup: BackupName = "ram",
    ) -> None:
        super().__init__()
        around = self._PHASES if around is None else around
        if isinstance(around, str) or not set(around) <= set(self._PHASES):
            raise ValueError(f"around is a list of some of {', '.join(self._PHASES)}, not {around!r}")
        self._resting = Resting(model_tag, optimizer_tag, pause, backup)
        self._around = frozenset(around)
        self._optimizers: list[Any] = []

    def phase(self) -> AbstractContextManager[None]:
        """A `with` in which the tags are paused. Afterwards exactly the tags that it paused are back."""
        return self._resting.phase(self._optimizers)

    def _start(self, model: "torch.nn.Module", optimizers: Iterable[Any]) -> None:
        self._resting.end()  # also of a phase that failed
        self._optimizers = list(optimizers)
        self._resting.adopt_model(model)

    def _begin(self, phase: str) -> None:
        if phase in self._around:
            self._resting.begin(self._optimizers)


def states_of(optimizer: Any) -> list[Any]:
    """The states of an optimizer, without its parameters."""
    return list(optimizer.state.values())


def adopt(thing: Any, tag: str, backup: BackupName | None) -> None:
    """`saver.adopt`, with a line in the log for tensors that stay outside of the tag."""
    for reason, count in saver.adopt(thing, tag=tag, backup=backup).skipped.items():
        _logger.info("%d tensors stay outside of tag %r: %s", count, tag, reason)
