"""A callback for `transformers.Trainer`: the optimizer's states leave the device while the trainer evaluates.

from ebbtide.integrations.transformers import EbbtideCallback

rest = EbbtideCallback()
trainer = Trainer(..., callbacks=[rest])
with rest.phase():      # a phase of yours: generation with another engine, say
    ...
"""

from typing import Any

from transformers import StoppingCriteria, TrainerCallback

from ebbtide import saver
from ebbtide.integrations.resting import RestingCallback


class EbbtideCallback(RestingCallback, TrainerCallback):
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
        around: "evaluate", "predict", both or none; None: both.
        backup: where the content goes: "ram", "pinned" or "disk", as in `saver.region`.

    Raises:
        TypeError, ValueError: malformed arguments.
    """

    _PHASES = ("evaluate", "predict")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adopts the model. Brings back the tags of an evaluation that failed."""
        optimizer = kwargs.get("optimizer")
        self._start(kwargs["model"], [] if optimizer is None else [optimizer])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses where an evaluation follows."""
        if control.should_evaluate:
            self._begin("evaluate")

    on_epoch_end = on_step_end

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pauses at the first batch of an evaluation or prediction that had no event before it."""
        is_left_out = control.should_evaluate and "evaluate" not in self._around
        if self._around and not is_left_out:
            self._resting.begin(self._optimizers)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Brings everything back: for a step, and after an evaluation also for the checkpoint that may follow."""
        self._resting.end()

    on_evaluate = on_predict = on_train_end = on_step_begin


class SafePoints(TrainerCallback, StoppingCriteria):
    """Does what other processes ask for (`ebbtide pause PID`) after each step of a trainer, and after each token of
    `generate`, and waits there until what they have paused is back: `saver.safe_point(wait=True)`.

        trainer = Trainer(model, callbacks=[SafePoints()])
        model.generate(**inputs, stopping_criteria=[SafePoints()])
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A safe point."""
        saver.safe_point(wait=True)

    on_prediction_step = on_step_end

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """A safe point. No sequence ends here."""
        import torch

        saver.safe_point(wait=True)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
