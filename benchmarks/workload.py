"""The state that is measured: a GPT with AdamW, trained for a few real steps, of a size that is asked for.

Everything is fp32: weights, and two moments for each, 12 bytes a parameter, so the moments are real and no part of the
state is made up. It knows nothing of tierfall.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

LAYERS = 14
BYTES_PER_PARAMETER = 12
WIDTH_FULL, SIZE_FULL_BYTES = 768, 1.5 * 2**30
HEAD_WIDTH = 64
BATCH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the model; ``vocabulary`` is what brings the state to its size."""

    layers: int
    width: int
    context: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.context + self.vocabulary + 2) * self.width


def shape_for(size_bytes: int) -> Shape:
    """Choose a model whose weights and AdamW state take about ``size_bytes``: as deep as ever, narrower if small."""
    exact = WIDTH_FULL * (size_bytes / SIZE_FULL_BYTES) ** 0.5
    width = HEAD_WIDTH * max(1, round(exact / HEAD_WIDTH))
    bare = Shape(layers=LAYERS, width=width, context=128, vocabulary=0)
    rest = size_bytes // BYTES_PER_PARAMETER - bare.parameters
    return Shape(
        layers=LAYERS, width=width, context=bare.context, vocabulary=max(256, rest // width)
    )


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.attention(self.before_attention(x))
        heads = heads.view(rows, length, 3, -1, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(rows, length, width))
        down: torch.Tensor = self.down(functional.gelu(self.up(self.before_mlp(x))))
        return x + down


class Gpt(nn.Module):
    """GPT-2's architecture; the output weight is the token embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(_Block(shape.width) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.last(x), self.tokens.weight)


class Workload:
    """A model and its optimizer; ``state`` is what a training loop hands to ``save``."""

    batch = BATCH

    def __init__(self, shape: Shape, *, device: str = "cpu", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        self.device = device
        with torch.device(device):
            self.model = Gpt(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def train(self, steps: int) -> None:
        """Take real steps on synthetic tokens; the gradients stay."""
        for _ in range(steps):
            self.backward()
            self.update()

    def backward(self) -> None:
        """Compute the gradients of one batch of synthetic tokens."""
        self.optimizer.zero_grad()
        self.loss().backward()  # type: ignore[no-untyped-call]

    def loss(self) -> torch.Tensor:
        """Run the forward pass of one batch."""
        shape = (self.batch, self.shape.context + 1)
        tokens = torch.randint(self.shape.vocabulary, shape, device=self.device)
        logits = self.model(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def update(self) -> None:
        """Step the optimizer on the gradients that are there; once more is new values at little cost. A restore leaves
        none."""
        if next(self.model.parameters()).grad is None:
            self.backward()
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of the state once, those of large items first, as an image orders them."""
        found = [parameter.detach() for parameter in self.model.parameters()]
        for parameter in self.model.parameters():
            entries = self.optimizer.state.get(parameter, {})
            found += [entries[name] for name in sorted(entries)]
        return sorted(found, key=lambda tensor: -tensor.element_size())

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The same tensors by name, as a program keeps them that saves one flat dict."""
        named = {}
        for name, parameter in self.model.named_parameters():
            named[f"model.{name}"] = parameter.detach()
            for entry, value in self.optimizer.state.get(parameter, {}).items():
                named[f"optimizer.{name}.{entry}"] = value
        return named

    def spoil(self) -> None:
        """Overwrite every value, so that a restore that does nothing is found out."""
        for tensor in self.tensors():
            tensor.fill_(-1)


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
