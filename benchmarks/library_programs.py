"""Models of transformers and timm, trained as their users would, with random weights."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from ebbtide import saver
from torch import nn
from torch.nn import functional

from benchmarks import device
from benchmarks.lms_programs import Program


def _random_words(number: int, vocabulary: int, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator(saver.device).manual_seed(number)
    return torch.randint(vocabulary, (batch, length), generator=generator, device=saver.device)


def _blocks_of(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules that the library itself would checkpoint."""
    return [each for each in model.modules() if type(each).__name__ == name]


def transformers(kind: str, block: str, batch: int, length: int, **config: Any) -> Program:
    """A model with a loss of its own. kind: "LlamaForCausalLM", say; block: the class of its blocks."""
    library = importlib.import_module("transformers")
    made = library.AutoConfig.for_model(config.pop("model_type"), **config)
    model = getattr(library, kind)(made).to(saver.device).train()
    made.use_cache = False

    def make_batch(number: int) -> tuple[torch.Tensor, ...]:
        return (_random_words(number, made.vocab_size, batch, length),)

    def loss(words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=words, labels=words).loss
        return found

    def checkpoint_some(chosen: list[nn.Module]) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for each in blocks:
            each.gradient_checkpointing = each in chosen

    blocks = _blocks_of(model, block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.is_gpu())
    return Program(model, blocks, optimizer, make_batch, loss, checkpoint_some=checkpoint_some)


def timm(name: str, block: str, batch: int, pixels: int, is_mixed: bool = True, **options: Any) -> Program:
    """An image classifier, with channels last."""
    made: nn.Module = importlib.import_module("timm").create_model(name, **options)
    model = made.to(saver.device, memory_format=torch.channels_last).train()

    def make_batch(number: int) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(saver.device).manual_seed(number)
        images = torch.randn(batch, 3, pixels, pixels, generator=generator, device=saver.device)
        labels = torch.randint(1000, (batch,), generator=generator, device=saver.device)
        return images.to(memory_format=torch.channels_last), labels

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Program(model, _blocks_of(model, block), optimizer, make_batch, loss, is_mixed=is_mixed)


PROGRAMS: dict[str, Callable[..., Program]] = {"transformers": transformers, "timm": timm}
