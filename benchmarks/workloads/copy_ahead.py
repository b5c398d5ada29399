"""Copies ahead of the first pause, the pause after them, and forward passes beside them.

`copy_ahead.ebbtide`: `saver.prepare(copy=True, wait=False)` until it is over, then the first pause of the process,
of what has not changed since. `copy_ahead.beside`: a forward pass by itself and while a thread copies the weights that
it reads, by turns; the copies are given back before each turn.

Passes follow one another without a pause, and the first seconds of each turn do not count: on an H200 passes that
follow a rest take 2 to 4 % less, until its power limit has settled after about 30 of them.
"""

import torch
from ebbtide import saver

from benchmarks import device
from benchmarks import tensors as kept
from benchmarks.cycles import Cycle, nothing
from benchmarks.keepers import Ebbtide
from benchmarks.limits.driver_calls import BareCalls, bytes_of_weights
from benchmarks.measured import Measured, Part, Stopwatch, turns
from benchmarks.sizes import Sizes
from benchmarks.workloads.forward import TAG, make_model


def measure_pause(sizes: Sizes) -> Measured:
    measured = Measured()
    keeper = Ebbtide(backup="ram", copies_all=False)
    bare = BareCalls(bytes_of_weights(sizes), sizes)
    cycle = Cycle(keeper, kept.llama_shapes(sizes.scale), nothing, sizes.rest_seconds, while_paused=bare.take_turn)
    device.synchronize()
    watch = Stopwatch()
    report = saver.prepare(keeper.tag, copy=True, wait=False).wait()
    measured.add("copy_ahead", *watch.stop())
    if report.copied + report.constant < cycle.bytes:
        measured.faults.append(f"only {report.copied} bytes of {cycle.bytes} were copied ahead: {report.note}")
    cycle.run(measured)
    return measured


def measure_beside(sizes: Sizes) -> Measured:
    model = make_model(sizes.model)
    tokens = torch.randint(sizes.model.vocabulary, (sizes.model.batch, sizes.model.tokens), device=saver.device)
    measured = Measured(bytes=sum(tensor.nbytes for tensor in model.parameters()))
    model(tokens)
    for _ in turns(sizes.samples, 4 * sizes.samples, sizes.patience_seconds):
        saver.pause(TAG)
        saver.resume(TAG, retain=False)  # nothing is ahead
        for _ in turns(1, 6 * sizes.samples, sizes.patience_seconds):
            model(tokens)
            device.synchronize()
        for _ in range(sizes.samples):
            _time_pass(measured, "forward", model, tokens)
        copying = saver.prepare(TAG, copy=True, wait=False)
        while not copying.done:
            _time_pass(measured, "forward_beside", model, tokens)
        copying.wait()
    return measured


def _time_pass(measured: Measured, metric: str, model: torch.nn.Module, tokens: torch.Tensor) -> None:
    device.synchronize()
    watch = Stopwatch()
    model(tokens)
    device.synchronize()
    measured.add(metric, *watch.stop())


def parts(sizes: Sizes) -> list[Part]:
    return [
        Part("copy_ahead.ebbtide", measure_pause, is_first_only=True),
        Part("copy_ahead.beside", measure_beside),
    ]
