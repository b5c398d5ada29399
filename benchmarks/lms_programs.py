"""Training programs of the kinds that people write, none of which large model support was made beside."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from ebbtide import saver
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks import device
from benchmarks.sizes import Arguments

Call = Callable[..., torch.Tensor]
VOCABULARY = 50304


@dataclass
class Program:
    """A model, and what a step of training does.

    Attributes:
        blocks: the modules that a user would checkpoint.
        batch: the inputs of a micro-batch, for the number of it.
        loss: of these inputs, by the model's forward.
        accumulates: micro-batches to a step of the optimizer.
        is_mixed: autocast to bf16.
        checkpoint_some: checkpoints these blocks; None: torch's checkpoint around their forwards does.
    """

    model: nn.Module
    blocks: list[nn.Module]
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    loss: Call
    accumulates: int = 1
    is_mixed: bool = True
    checkpoint_some: Callable[[list[nn.Module]], None] | None = None

    def step(self, number: int) -> torch.Tensor:
        total = torch.zeros((), device=saver.device)
        for micro in range(self.accumulates):
            with self._autocast():
                loss = self.loss(*self.batch(number * self.accumulates + micro)) / self.accumulates
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def checkpoint_each(self, stride: int) -> None:
        """What a user would write."""
        if self.checkpoint_some is not None:
            self.checkpoint_some(self.blocks[::stride])
            return
        for block in self.blocks[::stride]:
            block.forward = _checkpointed(block.forward)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(saver.device, torch.bfloat16) if self.is_mixed else nullcontext()


def _checkpointed(forward: Call) -> Call:
    def run(*arguments: Any, **options: Any) -> torch.Tensor:
        return checkpoint(forward, *arguments, use_reentrant=False, **options)

    return run


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.is_gpu())


def _random(number: int) -> torch.Generator:
    return torch.Generator(saver.device).manual_seed(number)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.heads = nn.Linear(width, width), heads

    def forward(
        self, hidden: torch.Tensor, others: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> torch.Tensor:
        def split(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        key, value = self.pair(others).chunk(2, dim=-1)
        mixed = functional.scaled_dot_product_attention(
            split(self.query(hidden)), split(key), split(value), attn_mask=mask, is_causal=is_causal
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Of GPT-2, BERT or ViT; with others to attend to, of a decoder."""

    def __init__(self, width: int, heads: int, feed: nn.Module | None = None, has_others: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if has_others else 2))
        self.attention = Attention(width, heads)
        self.across = Attention(width, heads) if has_others else None
        self.feed = feed or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None = None,
        is_causal: bool = True,
        others: torch.Tensor | None = None,
        others_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed = self.norms[0](hidden)
        hidden = hidden + self.attention(normed, normed, mask, is_causal)
        if self.across is not None:
            hidden = hidden + self.across(self.norms[2](hidden), others, others_mask, False)
        return hidden + self.feed(self.norms[1](hidden))


class Language(nn.Module):
    """Logits for each place; with others to attend to, of a decoder."""

    def __init__(self, blocks: Iterable[nn.Module], width: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def embed(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words) + self.places.weight[: words.shape[1]]

    def forward(self, words: torch.Tensor, *options: Any) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden, *options)
        return self.head(self.norm(hidden))


def language_loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _words(number: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=_random(number), device=saver.device)


def gpt(layers: int, width: int, batch: int, length: int, feed: Callable[[], nn.Module] | None = None) -> Program:
    with torch.device(saver.device):
        blocks = [Block(width, width // 64, feed() if feed else None) for _ in range(layers)]
        model = Language(blocks, width, length)

    def loss(words: torch.Tensor) -> torch.Tensor:
        return language_loss(model(words), words)

    return Program(model, [*blocks], make_adamw(model), lambda number: (_words(number, batch, length),), loss, 2)


class Experts(nn.Module):
    """Each token goes to the best two of them: no two steps have the same sizes."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = hidden.flatten(0, 1)
        scores, chosen = self.router(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            given = expert(tokens[token]) * scores[token, place, None]
            mixed = mixed.index_add(0, token, given.to(mixed.dtype))
        return mixed.view_as(hidden)


def experts(layers: int, width: int, batch: int, length: int, count: int) -> Program:
    return gpt(layers, width, batch, length, lambda: Experts(width, count))


class GatedBlock(nn.Module):
    """Of Llama: RMS norms, and a gated feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.RMSNorm(width), nn.RMSNorm(width), Attention(width, heads)
        self.gate, self.up = (nn.Linear(width, 8 * width // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.first(hidden)
        hidden = hidden + self.attention(normed, normed, None, True)
        normed = self.second(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def llama(layers: int, width: int, batch: int, length: int) -> Program:
    with torch.device(saver.device):
        blocks = [GatedBlock(width, width // 128 or 1) for _ in range(layers)]
        model = Language(blocks, width, length)

    def loss(words: torch.Tensor) -> torch.Tensor:
        return language_loss(model(words), words)

    return Program(model, [*blocks], make_adamw(model), lambda number: (_words(number, batch, length),), loss)


def padded(layers: int, width: int, batch: int, length: int) -> Program:
    """An encoder and a decoder, whose batches are as long as their longest sentence."""
    with torch.device(saver.device):
        encoder = Language([Block(width, width // 64) for _ in range(layers)], width, length)
        decoder = Language([Block(width, width // 64, has_others=True) for _ in range(layers)], width, length)
        model = nn.ModuleList([encoder, decoder])

    def make_batch(number: int) -> tuple[torch.Tensor, ...]:
        lengths = torch.randint(length // 4, length, (batch,), generator=torch.Generator().manual_seed(number))
        longest = int(lengths.max()) // 8 * 8
        is_word = torch.arange(longest)[None] < lengths[:, None]
        return _words(number, batch, longest), is_word.to(saver.device)[:, None, None, :]

    def loss(words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = encoder.embed(words)
        for block in encoder.blocks:
            hidden = block(hidden, mask, False)
        return language_loss(decoder(words, None, True, hidden, mask), words)

    return Program(model, [*encoder.blocks, *decoder.blocks], make_adamw(model), make_batch, loss)


def vit(layers: int, width: int, batch: int, pixels: int) -> Program:
    with torch.device(saver.device):
        patches = nn.Conv2d(3, width, 14, 14)
        blocks = [Block(width, width // 64) for _ in range(layers)]
        model = nn.ModuleList([patches, *blocks, nn.LayerNorm(width), nn.Linear(width, 1000)])

    def make_batch(number: int) -> tuple[torch.Tensor, ...]:
        images = torch.randn(batch, 3, pixels, pixels, generator=_random(number), device=saver.device)
        return images, torch.randint(1000, (batch,), generator=_random(number), device=saver.device)

    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = patches(images).flatten(2).transpose(1, 2)
        for block in blocks:
            hidden = block(hidden, None, False)
        return functional.cross_entropy(model[-1](model[-2](hidden.mean(1))), labels)

    return Program(model, [*blocks], make_adamw(model), make_batch, loss)


class Convolutions(nn.Module):
    """Of a diffusion model's UNet: GroupNorm, SiLU and a convolution, twice, beside a shorter way."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(8, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.beside = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(image)) + self.beside(image)


class Unet(nn.Module):
    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.begin, self.end = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down = nn.ModuleList(Convolutions(widths[max(level - 1, 0)], widths[level]) for level in range(levels))
        self.up = nn.ModuleList(
            Convolutions(widths[level] + widths[min(level + 1, levels - 1)], widths[level])
            for level in reversed(range(levels))
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden, skipped = self.begin(image), []
        for block in self.down:
            hidden = block(hidden)
            skipped.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        for block in self.up:
            hidden = functional.interpolate(hidden, scale_factor=2.0)
            hidden = block(torch.cat([hidden, skipped.pop()], 1))
        return self.end(hidden)


def unet(width: int, levels: int, batch: int, pixels: int) -> Program:
    """In fp32, with channels last, and SGD."""
    with torch.device(saver.device):
        model = Unet(width, levels).to(memory_format=torch.channels_last)

    def make_batch(number: int) -> tuple[torch.Tensor, ...]:
        images = torch.randn(batch, 3, pixels, pixels, generator=_random(number), device=saver.device)
        return (images.to(memory_format=torch.channels_last),)

    def loss(images: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(images), images)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return Program(model, [*model.down, *model.up], optimizer, make_batch, loss, is_mixed=False)


PROGRAMS: dict[str, Callable[..., Program]] = {
    "gpt": gpt,
    "unet": unet,
    "experts": experts,
    "llama": llama,
    "padded": padded,
    "vit": vit,
}


def make(name: str, arguments: Arguments) -> Program:
    """name: of one of these programs, or of a library's model, whose arguments say which library that is."""
    torch.manual_seed(0)
    if "library" not in arguments:
        return PROGRAMS[name](**arguments)
    from benchmarks import library_programs

    options = {key: value for key, value in arguments.items() if key != "library"}
    return library_programs.PROGRAMS[arguments["library"]](**options)
