"""A small transformer language model in plain torch, with a key-value cache for generation one token at a time.

Attention is written out: its fused forms choose kernels by size and device, and some of their backwards are not
deterministic.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward layer, both on a residual stream of shape (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, stream: Any, cache: Any = None, position: int = 0) -> Any:
        """`cache`, where given: (2, batch, heads, context, head width); filled from `position` on and read up to it."""
        stream = stream + self._attend(self.attention_norm(stream), cache, position)
        return stream + self.feed_out(functional.gelu(self.feed_in(self.feed_norm(stream))))

    def _attend(self, stream: Any, cache: Any, position: int) -> Any:
        batch, tokens, width = stream.shape
        projected = self.query_key_value(stream).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, position : position + tokens] = key
            cache[1, :, :, position : position + tokens] = value
            key, value = cache[:, :, :, : position + tokens]
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.heads)
        if tokens > 1:
            later = torch.ones(tokens, key.shape[2], dtype=torch.bool, device=stream.device).triu(1 + position)
            scores = scores.masked_fill(later, float("-inf"))
        mixed = scores.softmax(-1) @ value
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class LanguageModel(nn.Module):
    """Next-token logits for up to `context` tokens."""

    def __init__(self, vocabulary_size: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)

    def forward(self, tokens: Any, cache: Any = None, position: int = 0) -> Any:
        """Logits (batch, tokens, vocabulary) of tokens (batch, tokens) that stand at `position` and after."""
        places = torch.arange(position, position + tokens.shape[1], device=tokens.device)
        stream = self.token_embedding(tokens) + self.position_embedding(places)
        for index, block in enumerate(self.blocks):
            stream = block(stream, None if cache is None else cache[index], position)
        return self.head(self.norm(stream))

    def make_cache(self, batch: int) -> Any:
        """An empty key-value cache: (layers, 2, batch, heads, context, head width)."""
        heads = self.blocks[0].heads
        width = self.head.in_features
        shape = (len(self.blocks), 2, batch, heads, self.context, width // heads)
        return torch.zeros(shape, device=self.head.weight.device, dtype=self.head.weight.dtype)

    @torch.no_grad()
    def generate(self, prompts: Any, cache: Any, randomness: Any, temperature: float = 0.8) -> Any:
        """Continues prompts (batch, tokens) up to `context` tokens, one at a time; the keys and values of the
        earlier ones stay in `cache`. `randomness` is a torch.Generator of the same device.
        """
        tokens, fresh = prompts, prompts
        while tokens.shape[1] < self.context:
            logits = self(fresh, cache, tokens.shape[1] - fresh.shape[1])[:, -1]
            fresh = torch.multinomial((logits / temperature).softmax(-1), 1, generator=randomness)
            tokens = torch.cat((tokens, fresh), dim=1)
        return tokens
