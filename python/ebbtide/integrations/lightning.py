"""A callback for `lightning.pytorch.Trainer`: the optimizers' states leave the device while the trainer evaluates.

from ebbtide.integrations.lightning import EbbtideCallback

rest = EbbtideCallback()
trainer = Trainer(..., callbacks=[rest])
with rest.phase():      # a phase of yours, in a hook of your module, say
    ...
"""

from typing import Any

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:  # the package's other name
    from pytorch_lightning import Callback

from ebbtide import saver
from ebbtide.integrations.resting import RestingCallback


class EbbtideCallback(RestingCallback, Callback):
    """Moves model and optimizers into tags, and pauses tags around validation, test and prediction.

        trainer = Trainer(callbacks=[EbbtideCallback(pause=["model", "optimizer"], around=["test"])])

    Args:
        model_tag: the tag of the model; None leaves it where it is.
        optimizer_tag: the tag of the optimizers' states; None leaves them where they are.
        pause: the tags that leave the device; None: the optimizer's. A phase that uses the model must not pause the
            model's tag.
        around: some of "validation", "test" and "predict"; None: all.
        backup: where the content goes: "ram", "pinned" or "disk", as in `saver.region`.

    Raises:
        TypeError, ValueError: malformed arguments.
    """

    _PHASES = ("validation", "test", "predict")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Adopts the model, which is on its device by now."""
        self._start(pl_module, trainer.optimizers)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Pauses."""
        self._begin("validation")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Pauses."""
        self._begin("test")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Pauses."""
        self._begin("predict")

    def on_validation_end(self, trainer: Any, pl_module: Any, exception: BaseException | None = None) -> None:
        """Brings everything back."""
        self._resting.end()

    on_test_end = on_predict_end = on_exception = on_validation_end


class SafePoints(Callback):
    """Does what other processes ask for (`ebbtide pause PID`) after each batch, and waits there until what they have
    paused is back: `saver.safe_point(wait=True)`.

        trainer = Trainer(callbacks=[SafePoints()])
    """

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        """A safe point."""
        saver.safe_point(wait=True)

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = on_train_batch_end
