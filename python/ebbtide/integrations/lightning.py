"""A callback for `lightning.pytorch.Trainer`: the optimizers' states leave the device while the trainer evaluates.

from ebbtide.integrations.lightning import EbbtideCallback

rest = EbbtideCallback()
trainer = Trainer(..., callbacks=[rest])
with rest.phase():      # a phase of yours, in a hook of your module, say
    ...
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the package's other name
    from pytorch_lightning import Callback

from ebbtide.integrations.resting import Resting
from ebbtide.saver.values.arguments import BackupName

_PHASES = ("validation", "test", "predict")


class EbbtideCallback(Callback):
    """Moves model and optimizers into tags, and pauses tags around validation, test and prediction.

        trainer = Trainer(callbacks=[EbbtideCallback(pause=["model", "optimizer"], around=["test"])])

    Args:
        model_tag: the tag of the model; None leaves it where it is.
        optimizer_tag: the tag of the optimizers' states; None leaves them where they are.
        pause: the tags that leave the device; None: the optimizer's. A phase that uses the model must not pause the
            model's tag.
        around: some of "validation", "test" and "predict".
        backup: where the content goes: "ram", "pinned" or "disk", as in `saver.region`.

    Raises:
        TypeError, ValueError: malformed arguments.
    """

    def __init__(
        self,
        model_tag: str | None = "model",
        optimizer_tag: str | None = "optimizer",
        *,
        pause: Sequence[str] | None = None,
        around: Sequence[str] = _PHASES,
        backup: BackupName = "ram",
    ) -> None:
        super().__init__()
        if isinstance(around, str) or not set(around) <= set(_PHASES):
            raise ValueError(f"around is a list of some of {', '.join(_PHASES)}, not {around!r}")
        self._resting = Resting(model_tag, optimizer_tag, pause, backup)
        self._around = frozenset(around)
        self._optimizers: list[Any] = []

    def phase(self) -> AbstractContextManager[None]:
        """A `with` in which the tags are paused. Afterwards exactly what it paused is back."""
        return self._resting.phase(self._optimizers)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Adopts the model, which is on its device by now."""
        self._resting.end()
        self._optimizers = list(trainer.optimizers)
        self._resting.adopt_model(pl_module)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Pauses."""
        self._begin("validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Brings everything back."""
        self._resting.end()

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Pauses."""
        self._begin("test")

    def on_test_end(self, trainer: Any, pl_module: Any) -> None:
        """Brings everything back."""
        self._resting.end()

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Pauses."""
        self._begin("predict")

    def on_predict_end(self, trainer: Any, pl_module: Any) -> None:
        """Brings everything back."""
        self._resting.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Brings everything back."""
        self._resting.end()

    def _begin(self, phase: str) -> None:
        if phase in self._around:
            self._resting.begin(self._optimizers)
