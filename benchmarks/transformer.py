"""A Llama-like transformer in plain torch, for the forward pass that starts while its weights still arrive."""

import torch
from torch import nn
from torch.nn import functional

from benchmarks.sizes import ModelSize


class Block(nn.Module):
    """Grouped-query attention and a gated feed-forward layer, on a residual stream (batch, tokens, hidden)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self._size = size
        width = size.hidden // size.heads
        self.attention_norm = nn.RMSNorm(size.hidden)
        self.query = nn.Linear(size.hidden, size.hidden, bias=False)
        self.key = nn.Linear(size.hidden, size.key_value_heads * width, bias=False)
        self.value = nn.Linear(size.hidden, size.key_value_heads * width, bias=False)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False)
        self.feed_norm = nn.RMSNorm(size.hidden)
        self.gate = nn.Linear(size.hidden, size.feed, bias=False)
        self.up = nn.Linear(size.hidden, size.feed, bias=False)
        self.down = nn.Linear(size.feed, size.hidden, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self._attend(self.attention_norm(stream))
        normed = self.feed_norm(stream)
        return stream + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    def _attend(self, normed: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = normed.shape
        size = self._size

        def heads(projected: torch.Tensor, count: int) -> torch.Tensor:
            return projected.view(batch, tokens, count, -1).transpose(1, 2)

        query = heads(self.query(normed), size.heads)
        repeats = size.heads // size.key_value_heads
        key, value = (
            heads(layer(normed), size.key_value_heads).repeat_interleave(repeats, 1) for layer in (self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class Transformer(nn.Module):
    """Logits of the token that follows."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        return self.head(self.norm(stream[:, -1]))
