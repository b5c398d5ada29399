"""Generates tokens with a transformer of random weights in bf16.

Arguments: width, heads, vocabulary, weight_bytes (how many layers there are), resident_bytes (of the weights beyond
these, offloading keeps host copies), placement, tokens, sequences. Placements:

- plain: all weights on the device, or wherever its memory is said to be
- offload: accelerate's way. The weights of the last layers lie in host memory; before each of their modules runs,
  its own are copied to the device, and after it they are dropped there
- offload_pinned: the same from pinned memory, which accelerate leaves to its user
"""

import hashlib

import torch
from ebbtide.demo.model import LanguageModel
from torch import nn

from benchmarks.programs.common import DEVICE, IS_GPU, answer, arguments, time_each


class Offloaded:
    """One module's own parameters, on the device only while it runs."""

    def __init__(self, module: nn.Module, is_pinned: bool) -> None:
        self._is_pinned = is_pinned and IS_GPU
        self._nothing = torch.empty(0, device=DEVICE, dtype=torch.bfloat16)
        self._kept = [(parameter, self._to_host(parameter.data)) for parameter in module.parameters(recurse=False)]
        self._leave()
        module.register_forward_pre_hook(lambda *_: self._enter())
        module.register_forward_hook(lambda *_: self._leave())

    def _to_host(self, data: torch.Tensor) -> torch.Tensor:
        host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=self._is_pinned)
        return host.copy_(data)

    def _enter(self) -> None:
        for parameter, host in self._kept:
            parameter.data = host.to(DEVICE, non_blocking=self._is_pinned, copy=True)

    def _leave(self) -> None:
        for parameter, _ in self._kept:
            parameter.data = self._nothing


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def make_model() -> LanguageModel:
    """As many layers as the bytes of the weights ask for."""
    given = arguments()
    layer_bytes = 2 * 12 * given.width**2
    other_bytes = 2 * 2 * given.vocabulary * given.width
    layers = max(1, round((given.weight_bytes - other_bytes) / layer_bytes))
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LanguageModel(given.vocabulary, given.tokens + 1, given.width, layers, given.heads)
    return model.requires_grad_(False)


def offload(model: LanguageModel, resident_bytes: int, is_pinned: bool) -> int:
    """Takes layers off the device, the last first, until the rest fits; gives their bytes."""
    taken_bytes = 0
    excess_bytes = bytes_of(model) - resident_bytes
    for block in reversed(model.blocks):
        if taken_bytes >= excess_bytes:
            break
        taken_bytes += bytes_of(block)
        for module in block.modules():
            Offloaded(module, is_pinned)
    return taken_bytes


@torch.no_grad()
def generate(model: LanguageModel, count: int) -> torch.Tensor:
    """The likeliest tokens after token 1."""
    cache = model.make_cache(1)
    fresh = torch.ones(1, 1, dtype=torch.long, device=DEVICE)
    tokens = [fresh]
    for position in range(count):
        fresh = model(fresh, cache, position)[:, -1].argmax(-1, keepdim=True)
        tokens.append(fresh)
    return torch.cat(tokens)


def main() -> None:
    given = arguments()
    model = make_model()
    weight_bytes = bytes_of(model)
    host_bytes = 0
    if given.placement != "plain":
        host_bytes = offload(model, given.resident_bytes, given.placement == "offload_pinned")
        if IS_GPU:
            torch.cuda.empty_cache()
    texts = [generate(model, given.tokens)]  # the first one loads kernels
    seconds = time_each(range(given.sequences), lambda: texts.append(generate(model, given.tokens)))
    words = [text.flatten().tolist() for text in texts]
    answer(
        token=[each / given.tokens for each in seconds],
        weight_bytes=weight_bytes,
        offloaded_bytes=host_bytes,
        digest=hashlib.sha256(str(words[0]).encode()).hexdigest()[:16],
        is_steady=all(each == words[0] for each in words),
    )


if __name__ == "__main__":
    main()
