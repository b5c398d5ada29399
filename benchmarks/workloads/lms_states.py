"""AdamW in fp32, whose states are most of what training needs: large model support, and an optimizer on the CPU."""

from functools import partial

import torch
from ebbtide import saver
from torch import nn

from benchmarks import device
from benchmarks.lms_training import Peak, Training, measure_limited, measure_plain, simulated, time_steps
from benchmarks.measured import Measured, Part
from benchmarks.sizes import Sizes
from benchmarks.transformer import Block

SHARE = 60
RATE = 1e-5
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # which deterministic algorithms need


class OnCpu(torch.optim.Optimizer):
    """AdamW on copies of the weights in host memory: gradients go there, and new weights come back."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {})
        self._weights = weights
        self._copies = [torch.empty_like(each, device="cpu", pin_memory=True).copy_(each.detach()) for each in weights]
        for copy in self._copies:
            copy.grad = torch.empty_like(copy, pin_memory=True)
        self._adam = torch.optim.AdamW(self._copies, lr=RATE, fused=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.grad.copy_(weight.grad, non_blocking=True)
        device.synchronize()
        self._adam.step()
        for weight, copy in zip(self._weights, self._copies, strict=True):
            weight.copy_(copy, non_blocking=True)


def make_training(sizes: Sizes, is_on_cpu: bool = False) -> Training:
    size = sizes.training.states
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)  # not only with warnings: attention would not be deterministic then
    with torch.device(saver.device):
        blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        inputs = torch.randn(size.batch, size.tokens, size.hidden)
    weights = list(blocks.parameters())
    optimizer = OnCpu(weights) if is_on_cpu else torch.optim.AdamW(weights, lr=RATE)
    return Training(optimizer, lambda: blocks(inputs).pow(2).mean())


def measure_ebbtide(sizes: Sizes) -> Measured:
    return measure_limited(sizes, partial(make_training, sizes), lambda needed: needed * SHARE // 100)


def measure_without_limit(sizes: Sizes) -> Measured:
    return measure_plain(sizes, partial(make_training, sizes))


def measure_on_cpu(sizes: Sizes) -> Measured:
    device.need_gpu("on the simulated device everything is on the CPU")
    measured = Measured()
    with simulated(sizes):
        peak, training = Peak(), make_training(sizes, is_on_cpu=True)
        time_steps(measured, training.step, sizes.training.steps)
        measured.facts["peak_bytes"] = peak.read()
    return measured


def parts(_: Sizes) -> list[Part]:
    ways = {"plain": measure_without_limit, "ebbtide": measure_ebbtide, "cpu": measure_on_cpu}
    return [Part(f"lms_states.{way}", measure, environment=ENVIRONMENT) for way, measure in ways.items()]
