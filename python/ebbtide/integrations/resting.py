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
        pause: the tags that rest.
        backup: as in `saver.region`.

    Raises:
        TypeError, ValueError: malformed arguments.
    """

    def __init__(
        self, model_tag: str | None, optimizer_tag: str | None, pause: Sequence[str], backup: BackupName
    ) -> None:
        check_tags(tuple(tag for tag in (model_tag, optimizer_tag) if tag is not None))
        self._tags = check_tags((pause,) if isinstance(pause, str) else tuple(pause))
        if not self._tags:
            raise ValueError("pause names at least one tag")
        backup_code(backup)
        self._model_tag, self._optimizer_tag, self._backup = model_tag, optimizer_tag, backup
        self._away: list[str] = []
        self._is_resting = False

    def adopt_model(self, model: "torch.nn.Module") -> None:
        """Moves the model into its tag."""
        if self._model_tag is not None:
            adopt(model, self._model_tag, self._backup)

    def begin(self, optimizers: Iterable[Any]) -> None:
        """The tags rest from now on, with what the optimizers have made since. Does nothing if they rest already."""
        if self._is_resting:
            return
        for optimizer in optimizers if self._optimizer_tag is not None else ():
            adopt(states_of(optimizer), self._optimizer_tag or "", self._backup)
        known = saver.tags()
        self._away = [tag for tag in self._tags if tag in known and not saver.is_paused(tag)]
        self._is_resting = True  # before the pause: one that fails midway is brought back as well
        if self._away:
            saver.pause(*self._away)

    def end(self) -> None:
        """Brings back what `begin` took. Does nothing if nothing rests. After a failure the next call goes on."""
        if self._away:
            saver.resume(*self._away)
        self._away = []
        self._is_resting = False

    @contextlib.contextmanager
    def phase(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """A `with` in which the tags rest."""
        is_outer = not self._is_resting
        self.begin(optimizers)
        try:
            yield
        finally:
            if is_outer:
                self.end()


def states_of(optimizer: Any) -> list[Any]:
    """The states of an optimizer, without its parameters."""
    return list(optimizer.state.values())


def adopt(thing: Any, tag: str, backup: BackupName | None) -> None:
    """`saver.adopt`, with a line in the log for tensors that stay outside of the tag."""
    for reason, count in saver.adopt(thing, tag=tag, backup=backup).skipped.items():
        _logger.info("%d tensors stay outside of tag %r: %s", count, tag, reason)
