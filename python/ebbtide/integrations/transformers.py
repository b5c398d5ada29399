"""A callback for `transformers.Trainer`: the optimizer's states leave the device while the trainer evaluates.

from ebbtide.integrations.transformers import EbbtideCallback

rest = EbbtideCallback()
trainer = Trainer(..., callbacks=[rest])
with rest.phase():      # a phase of yours: generation with another engine, say
    ...
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from transformers import TrainerCallback

from ebbtide.integrations.resting import Resting
from ebbtide.saver.values.arguments import BackupName

_PHASES = ("evaluate", "predict")


class EbbtideCallback(TrainerCallback):
    """Moves model and optimizer into tags, and pauses tags around evaluation and prediction.

        trainer = Trainer(model, callbacks=[EbbtideCallback(around=["evaluate"])])

    Evaluation that the trainer begins by itself finds the tags paused. Where you call `trainer.evaluate()` or
    `predict()`, transformers has no event before it: the tags are paused after its first batch. Wrap the call in
    `phase()` to have them paused before.

    Args:
        model_tag: the tag of the model; None leaves it where it is.
        optimizer_tag: the tag of the optimizer's states; None leaves them where they are.
        pause: the tags that leave the device; None: the optimizer's. A phase that uses the model must not pause the
            model's tag.
        around: "evaluate", "predict", both or none.
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
        if isinstance(around, str) or not set(around) <= set(_PHASES):
            raise ValueError(f"around is a list of some of {', '.join(_PHASES)}, not {around!r}")
        self._resting = Resting(model_tag, optimizer_tag, pause, backup)
        self._around = frozenset(around)
        self._optimizers: list[Any] = []

    def phase(self) -> AbstractContextManager[None]:
        """A `with` in which the tags are paused. Afterwards exactly what it paused is back."""
        return self._resting.phase(self._optimizers)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adopts the model. Brings back what an evaluation that failed has left away."""
        self._resting.end()
        self._optimizers = [optimizer for optimizer in [kwargs.get("optimizer")] if optimizer is not None]
        self._resting.adopt_model(kwargs["model"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The step needs everything."""
        self._resting.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses where an evaluation follows."""
        if control.should_evaluate and "evaluate" in self._around:
            self._resting.begin(self._optimizers)

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses where nothing told of the evaluation before. Whether it is one or a prediction is not told either."""
        is_left_out = control.should_evaluate and "evaluate" not in self._around
        if self._around and not is_left_out:
            self._resting.begin(self._optimizers)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Brings everything back, also for the checkpoint that may follow."""
        self._resting.end()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        """Brings everything back."""
        self._resting.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Brings everything back."""
        self._resting.end()
