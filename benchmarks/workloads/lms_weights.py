"""The forward pass of a model whose weights are more than the device may hold: large model support, memory that spilled
to the host, and hooks that copy the weights of each module.

The ideal of a pass over weights of which X bytes lie on the host is max(forward, X / L). The fact `tokens` is how many
one pass takes.
"""

from collections.abc import Callable
from functools import partial

import ebbtide
import torch
from ebbtide import _core, saver
from torch import nn

from benchmarks import device
from benchmarks.baselines.module_hooks import ModuleHooks
from benchmarks.lms_training import Peak, simulated, weight_bytes
from benchmarks.measured import Measured, Part, Stopwatch
from benchmarks.sizes import MIB, Sizes
from benchmarks.transformer import Transformer

TAG = "weights"


def make_model(sizes: Sizes) -> nn.Module:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.is_gpu() else torch.float32)
    try:
        with torch.device(saver.device):
            return Transformer(sizes.model)
    finally:
        torch.set_default_dtype(before)


class Passes:
    """Passes of a model over tokens that are the same for all models."""

    def __init__(self, sizes: Sizes, model: nn.Module) -> None:
        size = sizes.model
        self._model, self._samples = model, sizes.samples
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(size.vocabulary, (size.batch, size.tokens), generator=generator).to(saver.device)

    def time(self, measured: Measured, after_pass: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Metric "forward", after two passes that are not counted. Returns the logits, on the host."""
        measured.facts["tokens"] = self._tokens.numel()
        logits = torch.empty(0)
        with torch.no_grad():
            for number in range(2 + self._samples):
                device.synchronize()
                watch = Stopwatch()
                logits = self._model(self._tokens)
                device.synchronize()
                if number >= 2:
                    measured.add("forward", *watch.stop())
                after_pass()
        return logits.cpu().clone()


def needed_bytes(sizes: Sizes) -> tuple[int, torch.Tensor]:
    """The peak of a pass with all weights on the device, and its logits."""
    with simulated(sizes):
        peak = Peak()
        logits = Passes(sizes, make_model(sizes)).time(Measured())
        return peak.read(), logits


def measure_plain(sizes: Sizes) -> Measured:
    measured = Measured()
    with simulated(sizes):
        model = make_model(sizes)
        measured.facts["weight_bytes"] = weight_bytes(model)
        Passes(sizes, model).time(measured)
    return measured


def compare(measured: Measured, logits: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(logits, expected):
        measured.faults.append("the logits are not those of weights on the device")


def moved_bytes() -> float:
    numbers = ebbtide.lms.stats()
    return numbers["weight_loaded_bytes"] + numbers["streamed_bytes"]


def measure_ebbtide(sizes: Sizes, share: int) -> Measured:
    needed, expected = needed_bytes(sizes)
    limit = needed * share // 100
    measured = Measured(facts={"needed_bytes": needed, "limit_bytes": limit})
    loaded: list[float] = []
    with ebbtide.lms.enable(limit=limit, min_size=sizes.training.least_bytes):
        passes = Passes(sizes, make_model(sizes))
        logits = passes.time(measured, lambda: loaded.append(moved_bytes()))
        measured.facts.update(ebbtide.lms.stats())
    measured.facts["moved_bytes"] = round(loaded[-1] - loaded[-2])
    compare(measured, logits, expected)
    if (peak := measured.facts["peak_device_bytes"]) > limit:
        measured.faults.append(f"{peak / MIB:.0f} MiB were held, and the limit is {limit / MIB:.0f} MiB")
    return measured


def measure_split(sizes: Sizes, share: int) -> Measured:
    """What does not fit is read over the bus in each pass."""
    needed, expected = needed_bytes(sizes)
    measured = Measured(facts={"needed_bytes": needed, "limit_bytes": needed * share // 100})
    model = make_model(sizes)
    on_device = max(0, weight_bytes(model) - needed * (100 - share) // 100)
    del model
    device.empty_cache()
    saver.configure(device_limit=_core.query_device(0).held_bytes + on_device, reserve=0)
    with saver.region(TAG, overflow="split"):
        model = make_model(sizes)
    saver.configure(device_limit=None)
    measured.facts["moved_bytes"] = saver.tags()[TAG].host_bytes
    compare(measured, Passes(sizes, model).time(measured), expected)
    return measured


def measure_hooks(sizes: Sizes, share: int) -> Measured:
    device.need_gpu("on the simulated device there is no link to copy over")
    needed, expected = needed_bytes(sizes)
    model = make_model(sizes)
    hooks = ModuleHooks(model, needed * (100 - share) // 100)
    measured = Measured(facts={"needed_bytes": needed, "moved_bytes": hooks.moved_bytes})
    device.empty_cache()
    compare(measured, Passes(sizes, model).time(measured), expected)
    return measured


def parts(sizes: Sizes) -> list[Part]:
    limited = [
        Part(f"lms_weights.{who}_{share}", partial(measure, share=share))
        for share in sizes.training.shares
        for who, measure in (("ebbtide", measure_ebbtide), ("hooks", measure_hooks), ("split", measure_split))
    ]
    return [Part("lms_weights.plain", measure_plain), *limited]
