"""A byte-level GPT of a few million parameters: plain torch modules, independent of tierfall."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a model is: ``width`` channels, ``layers`` blocks of ``heads`` heads, ``context`` bytes at a time."""

    width: int
    layers: int
    heads: int
    context: int
    dropout: float = 0.1


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each added to its normalised input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.before_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.before_attention(x)))
        x = x + self.dropout(self.feed(self.before_feed(x)))
        return x

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.queries_keys_values(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Gpt(nn.Module):
    """Predicts the next byte; the output head is the embedding itself (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.apply(_start_small)
        self.head.weight = self.embedding.weight

    def forward(self, text: Tensor) -> Tensor:
        """Return logits of the next byte, (batch, length, 256), for ``text`` of (batch, length)."""
        x = self.dropout(self.embedding(text) + self.position.weight[: text.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _start_small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def next_byte_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross entropy, in nats a byte, over a batch of (batch, length + 1) bytes."""
    logits: Tensor = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def fingerprint(state: dict[str, Tensor]) -> str:
    """Return a digest of every tensor's bytes: two models of one digest are equal to the last bit."""
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode())
        data = state[name].detach().contiguous().view(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()
