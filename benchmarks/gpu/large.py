"""A model of billions of parameters in training: fp32 weights and two fp32 moments for each, 12 bytes a parameter.

About 1,000 tensors at any size. It knows nothing of tierfall.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from benchmarks.workload import HEAD_WIDTH, Shape, Workload

LAYERS = 20
"""With 12 tensors each, 4 more, and 3 of state for each of them."""
CONTEXT = 1024
VOCABULARY_MIN = 256
BLOCK_BYTES = 4096


def shape_of(parameters: int) -> Shape:
    """Choose a model of about so many parameters: as deep as ever, the vocabulary taking up the rest."""
    heads = int((parameters / (12 * LAYERS)) ** 0.5) // HEAD_WIDTH
    width = HEAD_WIDTH * max(1, heads)
    bare = Shape(layers=LAYERS, width=width, context=CONTEXT, vocabulary=0)
    rest = (parameters - bare.parameters) // width
    return Shape(layers=LAYERS, width=width, context=CONTEXT, vocabulary=max(VOCABULARY_MIN, rest))


class LargeWorkload(Workload):
    """Its products of matrices are bf16, as in mixed precision."""

    batch = 4

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return super().loss()

    def make_moments(self) -> None:
        """Step the optimizer on random gradients, which takes no memory for activations; none is kept."""
        for parameter in self.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()


def fingerprint(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Sum the bytes of each 4 KiB of each tensor: little to keep, though an update of the state alters it."""
    found = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        whole = flat.numel() // BLOCK_BYTES * BLOCK_BYTES
        found.append(flat[:whole].view(-1, BLOCK_BYTES).sum(1, dtype=torch.int64))
        found.append(flat[whole:].sum(dtype=torch.int64))
    return found


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the fingerprint, which another process can compare."""
    total = hashlib.sha256()
    for sums in fingerprint(tensors):
        total.update(sums.cpu().numpy().tobytes())
    return total.hexdigest()
