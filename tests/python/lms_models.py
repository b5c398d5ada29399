"""Small models of the kinds that people train, for large model support: each as a function that makes a training step.

A step takes its number and returns its loss. All random numbers are torch's own, so two runs after the same seed are
equal bit for bit.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[int], float]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.project, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, length, width = hidden.shape
        split = self.project(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.feed = feed or nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.attention(self.first(hidden), mask)
        return hidden + self.feed(self.second(hidden))


class Experts(nn.Module):
    """Each token goes to the best two: no two steps have the same sizes."""

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
            mixed = mixed.index_add(0, token, expert(tokens[token]) * scores[token, place, None])
        return mixed.view_as(hidden)


class Decoder(nn.Module):
    def __init__(self, blocks: list[nn.Module], width: int, words: int = 200) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(words, width), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, words: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = self.embed(words)
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
        return self.head(self.norm(hidden))


class Residual(nn.Module):
    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(norm(channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)),
            *(norm(channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image + self.body(image)


class Unet(nn.Module):
    """With skip connections: what goes down is used again on the way up."""

    def __init__(self, channels: int, depth: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        sizes = [channels << level for level in range(depth)]
        self.begin, self.end = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 3, 3, padding=1)
        self.down = nn.ModuleList(nn.ModuleList([Residual(size, norm), Residual(size, norm)]) for size in sizes)
        self.shrink = nn.ModuleList(nn.Conv2d(size, 2 * size, 2, stride=2) for size in sizes[:-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, stride=2) for size in sizes[:-1])
        self.up = nn.ModuleList(Residual(size, norm) for size in sizes[:-1])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden, kept = self.begin(image), []
        for level, blocks in enumerate(self.down):
            for block in blocks:
                hidden = block(hidden)
            if level < len(self.shrink):
                kept.append(hidden)
                hidden = self.shrink[level](hidden)
        for level in reversed(range(len(self.grow))):
            hidden = self.up[level](self.grow[level](hidden) + kept.pop())
        return self.end(hidden)


def language_step(model: nn.Module, optimizer: Any, batch: int, length: int, **options: Any) -> Step:
    def step(number: int) -> float:
        found = 0.0
        optimizer.zero_grad()
        for _ in range(options.get("micro_batches", 1)):
            words = torch.randint(0, 200, (batch, length))
            with torch.autocast("cpu", torch.bfloat16, enabled=options.get("autocast", False)):
                loss = functional.cross_entropy(model(words).flatten(0, 1).float(), words.flatten())
            loss.backward()
            found += loss.item()
        if options.get("clips"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return found

    return step


def gpt(depth: int = 8, width: int = 64, batch: int = 8, length: int = 32, **options: Any) -> Step:
    torch.manual_seed(0)
    model = Decoder([Block(width, 4) for _ in range(depth)], width)
    return language_step(model, torch.optim.SGD(model.parameters(), 0.1), batch, length, **options)


def experts(depth: int = 4, width: int = 64) -> Step:
    torch.manual_seed(0)
    model = Decoder([Block(width, 4, Experts(width, 4)) for _ in range(depth)], width)
    return language_step(model, torch.optim.SGD(model.parameters(), 0.1), 8, 32)


def padded(depth: int = 6, width: int = 64) -> Step:
    """Batches of several lengths, with a mask in a keyword."""
    torch.manual_seed(0)
    model = Decoder([Block(width, 4) for _ in range(depth)], width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number: int) -> float:
        length = (64, 56, 48, 60)[number % 4]
        words = torch.randint(0, 200, (4, length))
        mask = torch.rand(4, 1, length, length) < 0.9
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(words, mask).flatten(0, 1), words.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def unet(norm: Callable[[int], nn.Module] = lambda size: nn.GroupNorm(4, size)) -> Step:
    torch.manual_seed(0)
    model = Unet(8, 3, norm)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(number: int) -> float:
        image = torch.randn(4, 3, 64, 64)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(image), image)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def batch_norms() -> Step:
    """Each forward changes buffers, so that nothing can be recomputed."""
    return unet(nn.BatchNorm2d)


KINDS: dict[str, Callable[[], Step]] = {
    "gpt": gpt,
    "gpt_autocast": lambda: gpt(6, autocast=True, micro_batches=2, clips=True),
    "experts": experts,
    "padded": padded,
    "unet": unet,
    "batch_norms": batch_norms,
}
