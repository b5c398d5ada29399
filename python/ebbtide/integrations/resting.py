"""Tags that rest on the host while a trainer does something that does not need them.

What the callbacks for `transformers` and `lightning` share.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
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
        self._overdue: list[str] = []  # of these, what could not come back when it should have
        self._is_begun = False

    def adopt_model(self, model: "torch.nn.Module") -> None:
        """Moves the model into its tag."""
        if self._model_tag is not None:
            adopt(model, self._model_tag, self._backup)

    def begin(self, optimizers: Iterable[Any]) -> None:
        """The tags rest from now on, with what the optimizers have made since. Does nothing if they rest already."""
        if self._is_begun and all(map(saver.is_paused, self._away)):
            return
        self._take(optimizers)
        self._is_begun = True

    def end(self) -> None:
        """Brings back what `begin` took. Does nothing if nothing rests. After a failure the next call goes on."""
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
        self._adopt_states(optimizers)
        known = saver.tags()
        leaving = [tag for tag in self._tags if tag in known and known[tag].resident_bytes and self._may_take(tag)]
        self._away = list(dict.fromkeys([*self._away, *leaving]))  # before the pause, which may fail midway
        if leaving:
            saver.pause(*leaving)

    def _may_take(self, tag: str) -> bool:
        """What somebody else has paused stays as it is."""
        return tag in self._away or not saver.is_paused(tag)

    def _adopt_states(self, optimizers: Iterable[Any]) -> None:
        tag = self._optimizer_tag
        if tag is None or (tag in saver.tags() and saver.is_paused(tag)):
            return
        for optimizer in optimizers:
            adopt(states_of(optimizer), tag, self._backup)

    def _bring_back(self, tags: Iterable[str]) -> None:
        self._overdue = list(dict.fromkeys([*self._overdue, *tags]))
        if self._overdue:
            saver.resume(*self._overdue)
        self._away = [tag for tag in self._away if tag not in self._overdue]
        self._overdue = []


def states_of(optimizer: Any) -> list[Any]:
    """The states of an optimizer, without its parameters."""
    return list(optimizer.state.values())


def adopt(thing: Any, tag: str, backup: BackupName | None) -> None:
    """`saver.adopt`, with a line in the log for tensors that stay outside of the tag."""
    for reason, count in saver.adopt(thing, tag=tag, backup=backup).skipped.items():
        _logger.info("%d tensors stay outside of tag %r: %s", count, tag, reason)
