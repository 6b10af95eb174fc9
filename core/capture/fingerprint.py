"""A fingerprint of a live state: enough of it to tell later whether it was changed, taken in less than a millisecond.

It covers up to 256 tensors, evenly chosen: their version counters, their addresses, and, in host memory, a cache line
of each. It keeps no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.image import codec, naming
from tierfall.core.image.item import unwrap
from tierfall.core.image.sharded import any_sharded, local_tensor
from tierfall.core.own_memory import LINE_BYTES, Memory

TENSORS_MAX = 256
_PLAIN_KINDS = (torch.Tensor, nn.Parameter)


class Fingerprint:
    """The fingerprint of one state. ``take`` takes it anew, ``changed`` names a tensor that differs from it."""

    def __init__(self, state: Mapping[Any, object]) -> None:
        found = [*live_tensors(state)]
        chosen = found[:: -(-len(found) // TENSORS_MAX) or 1]
        self._names = [name for name, _ in chosen]
        self._refs = [weakref.ref(tensor) for _, tensor in chosen]
        self._entries = _entries(state)
        self._lines: _Lines | None = None
        self._seen = self._look()

    def take(self, state: Mapping[Any, object]) -> bool:
        """Take it anew; False where the state has other entries by now, or a tensor is gone."""
        if self._entries != _entries(state) or any(ref() is None for ref in self._refs):
            return False
        self._seen = self._look()
        return True

    def changed(self) -> str | None:
        """Name a tensor that was written to, replaced or moved since; None where none was."""
        for name, ref in zip(self._names, self._refs, strict=True):
            if ref() is None:
                return name
        versions, pointers, lines = self._look()
        before = self._seen
        for at, name in enumerate(self._names):
            if (versions[at], pointers[at]) != (before.versions[at], before.pointers[at]):
                return name
        if before.lines is not None and lines is not None and self._lines is not None:
            differs = (lines != before.lines).any(1).nonzero()
            if len(differs):
                return self._names[self._lines.of[int(differs[0])]]
        return None

    def _look(self) -> _Seen:
        tensors = [tensor for ref in self._refs if (tensor := ref()) is not None]
        if any_sharded(tensors):
            tensors = [*map(local_tensor, tensors)]
        versions = [-1 if t.is_inference() else t._version for t in tensors]
        plain = [t.layout is torch.strided and type(t) in _PLAIN_KINDS for t in tensors]
        pointers = [
            t.data_ptr() if is_plain else 0 for t, is_plain in zip(tensors, plain, strict=True)
        ]
        if self._lines is None or self._lines.pointers != pointers:
            self._lines = _Lines.of_tensors(tensors, pointers)
        lines = None
        if self._lines.memory is not None:
            with torch.inference_mode(False):
                lines = self._lines.memory.lines.index_select(0, self._lines.rows)
        return _Seen(versions, pointers, lines)


class _Seen(NamedTuple):
    """What was seen of the tensors of a fingerprint."""

    versions: list[int]
    pointers: list[int]
    lines: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Lines:
    """Where a whole cache line is read of tensors in host memory that have one, and whose it is (``of``)."""

    pointers: list[int]
    memory: Memory | None
    rows: torch.Tensor
    of: list[int]

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor], pointers: list[int]) -> _Lines:
        of = [
            at
            for at, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True))
            if pointer
            and tensor.is_cpu
            and tensor.is_contiguous()
            and tensor.nbytes >= 2 * LINE_BYTES
        ]
        starts = [-(-pointers[at] // LINE_BYTES) * LINE_BYTES for at in of]
        memory = Memory(min(starts), max(starts) + LINE_BYTES) if starts else None
        low = 0 if memory is None else memory.low
        rows = np.array([(start - low) // LINE_BYTES for start in starts], dtype=np.int64)
        return cls(pointers, memory, torch.from_numpy(rows), of)


def live_tensors(state: Mapping[Any, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state with their paths: those of modules and optimizers, and in plain containers. Nothing
    of the user's is called."""
    for key, value in state.items():
        yield from _below(value, (None, key), 0)


def _below(value: object, trail: naming.Trail, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    value = unwrap(value)
    if isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield naming.path((trail, name)), tensor
    elif isinstance(value, Optimizer):
        for number, held in enumerate(value.state.values()):
            yield from _below(held, ((trail, "state"), number), depth + 1)
    elif isinstance(value, torch.Tensor):
        yield naming.path(trail), value
    elif depth <= codec.DEPTH_MAX and isinstance(value, Mapping):
        for key, child in value.items():
            yield from _below(child, (trail, key), depth + 1)
    elif depth <= codec.DEPTH_MAX and type(value) in (list, tuple):
        for index, child in enumerate(value):  # type: ignore[arg-type]
            yield from _below(child, (trail, index), depth + 1)


def _entries(state: Mapping[Any, object]) -> tuple[int, ...]:
    return tuple(map(id, state.values()))
