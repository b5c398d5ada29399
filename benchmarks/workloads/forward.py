"""A transformer's forward pass right after a resume: one that overlaps with it (`attach`), against one after it.

The model has the size of Llama-8B, and the input so many tokens that computing takes about as long as the bytes do.
"""

from collections.abc import Callable

import torch
from ebbtide import saver

from benchmarks import device
from benchmarks.measured import Measured, Part, Stopwatch, turns
from benchmarks.sizes import ModelSize, Sizes
from benchmarks.transformer import Transformer

TAG = "weights"
Run = Callable[[Transformer, torch.Tensor], torch.Tensor]


def make_model(size: ModelSize) -> Transformer:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(saver.device), saver.region(TAG, backup="ram", retain=True):
        return Transformer(size).requires_grad_(False)


def resume_attached(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    pending = saver.resume(TAG, wait=False, order=model, hold_stream=False)
    pending.attach(model)
    logits = model(tokens)
    pending.wait()
    return logits


def resume_then_forward(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    saver.resume(TAG)
    return model(tokens)


class Passes:
    """Timed forward passes of one model."""

    def __init__(self, sizes: Sizes) -> None:
        size = sizes.model
        self._model = make_model(size)
        self._tensors = list(self._model.parameters())
        self._tokens = torch.randint(size.vocabulary, (size.batch, size.tokens), device=saver.device)
        self.bytes = sum(tensor.nbytes for tensor in self._tensors)

    def take(self, metric: str, run: Run, measured: Measured) -> None:
        """A pass of resident weights, a pause, and `run`, which must give the same logits bit for bit."""
        for tensor in self._tensors:
            tensor.neg_()  # so that nothing is as it was stored
        expected = self._time("forward", lambda model, tokens: model(tokens), measured)
        saver.pause(TAG)
        device.synchronize()
        logits = self._time(metric, run, measured)
        if not torch.equal(logits, expected):
            measured.faults.append(f"{metric}: other logits than without a pause")

    def _time(self, metric: str, run: Run, measured: Measured) -> torch.Tensor:
        device.synchronize()
        watch = Stopwatch()
        logits = run(self._model, self._tokens)
        device.synchronize()
        measured.add(metric, *watch.stop())
        return logits


def measure(sizes: Sizes) -> Measured:
    passes = Passes(sizes)
    ignored = Measured()
    measured = Measured(bytes=passes.bytes)
    for turn in turns(1 + sizes.samples, 1 + 2 * sizes.samples, sizes.patience_seconds):
        for metric, run in (("attached", resume_attached), ("resume_then_forward", resume_then_forward)):
            passes.take(metric, run, measured if turn else ignored)
    measured.faults += ignored.faults
    return measured


def parts(sizes: Sizes) -> list[Part]:
    return [Part("forward.ebbtide", measure)]
