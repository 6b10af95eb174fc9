"""What a walk remembers for the next one: the tensors that a module or an optimizer brought, where nothing moved.

Of a tensor only its address, shape, strides and kind are kept, never the tensor itself: memory that the training lets
go of is free. A part is taken from here only where everything that a walk would look at is as it was. Where nothing but
tensors decides what a module's ``state_dict`` holds (``modules.ModuleTree``), that is not even called.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tierfall.core.state.modules import KnownModuleTree
from tierfall.core.state.optimizers import Numbering

BLOCK = 256
"""So many tensors are looked at in one go: what is known of them stays in a core's cache from question to question."""

_POINTER = torch.Tensor.data_ptr
_SHAPE = operator.attrgetter("shape")
_STRIDE = torch.Tensor.stride
_DTYPE = operator.attrgetter("dtype")
_NEGATED = torch.Tensor.is_neg


class Fingerprints(NamedTuple):
    """Where tensors lie, and how they are read."""

    pointers: array[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    negated: list[bool]


def take_fingerprints(tensors: Sequence[torch.Tensor]) -> Fingerprints | None:
    """Look at tensors; None where one of them is no plain tensor in strides."""
    if set(map(type, tensors)) != {torch.Tensor}:
        return None
    looks = Fingerprints(array("Q"), [], [], [], [])
    try:
        for start in range(0, len(tensors), BLOCK):
            block = tensors[start : start + BLOCK]
            looks.pointers.extend(map(_POINTER, block))
            looks.shapes.extend(map(_SHAPE, block))
            looks.strides.extend(map(_STRIDE, block))
            looks.dtypes.extend(map(_DTYPE, block))
            looks.negated.extend(map(_NEGATED, block))
    except RuntimeError:  # sparse, nested and the like have no address, or no shape
        return None
    return looks


class Columns(NamedTuple):
    """What a table knows of its tensors, beside themselves and their addresses. Lists in a walk that is under way,
    tuples thereafter."""

    names: Any
    dtypes: Any
    shapes: Any
    changes: Any
    owners: Any
    trails: Any
    plain: Any
    strides: Any
    pieces: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPart:
    """A run of tensors in a walk's table, beginning at number ``first``, and the node that stands for them.

    ``about`` is what else has to be equal for the same tensors to mean the same, and ``owners`` those of all that were
    met; ``picked`` says which of these are stored, in their order, where it is not each in turn; ``first_at`` maps
    addresses to numbers.
    """

    first: int
    about: tuple[Any, ...]
    owners: list[int]
    looks: Fingerprints
    node: Any
    columns: Columns
    pointers: array[int]
    picked: tuple[int, ...] | None
    first_at: dict[int, int]

    def is_again(
        self, first: int, about: tuple[Any, ...], owners: list[int], looks: Fingerprints
    ) -> bool:
        """Say whether tensors that look so, met at the same place of a walk, are this part."""
        return (
            self.first == first
            and self.about == about
            and self.owners == owners
            and self.looks == looks
        )


class WalkCache:
    """The parts of the walk before, by the name that each stands at, and the module trees that it met; the columns of
    its table, where there were no aliases but in parts, and the parts by their first numbers there."""

    def __init__(self) -> None:
        self._parts: dict[str, CachedPart] = {}
        self.trees: dict[str, KnownModuleTree] = {}
        self.numberings: dict[str, Numbering] = {}
        """Of the optimizers that the walk before met, without their parameters."""
        self.columns: Columns | None = None
        self.parts_at: dict[int, CachedPart] = {}

    def part(self, name: str) -> CachedPart | None:
        return self._parts.get(name)

    def keep(self, name: str, part: CachedPart | None) -> None:
        """Remember a part, or that there is none."""
        if part is None:
            self._parts.pop(name, None)
        else:
            self._parts[name] = part

    def forget_others(self, names: Collection[str]) -> None:
        """Forget what the last walk did not meet."""
        for known in (self._parts, self.trees):
            for name in known.keys() - set(names):
                del known[name]
