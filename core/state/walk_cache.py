"""Results of a walk that the next walk reuses: the tensors of a module or an optimizer whose memory has not moved.

A part has only the addresses, shapes, strides and dtypes of its tensors, never a reference, so that memory which the
training releases is freed. A part is reused only if everything that a walk examines is unchanged. If nothing but
tensors determines a module's ``state_dict`` (``modules.tree_of``), the method is not called.
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
"""Tensors per pass: few enough that their objects stay in a core's cache from one attribute to the next."""

_POINTER = torch.Tensor.data_ptr
_SHAPE = operator.attrgetter("shape")
_STRIDE = torch.Tensor.stride
_DTYPE = operator.attrgetter("dtype")
_NEGATED = torch.Tensor.is_neg


class Fingerprints(NamedTuple):
    """Addresses of tensors, and how their memory is interpreted."""

    pointers: array[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    negated: list[bool]


def take_fingerprints(tensors: Sequence[torch.Tensor]) -> Fingerprints | None:
    """The fingerprints of tensors; None if one of them is not a plain strided tensor."""
    if set(map(type, tensors)) != {torch.Tensor}:
        return None
    fingerprints = Fingerprints(array("Q"), [], [], [], [])
    try:
        for start in range(0, len(tensors), BLOCK):
            block = tensors[start : start + BLOCK]
            fingerprints.pointers.extend(map(_POINTER, block))
            fingerprints.shapes.extend(map(_SHAPE, block))
            fingerprints.strides.extend(map(_STRIDE, block))
            fingerprints.dtypes.extend(map(_DTYPE, block))
            fingerprints.negated.extend(map(_NEGATED, block))
    except RuntimeError:  # sparse, nested and similar tensors have no address or shape
        return None
    return fingerprints


class Columns(NamedTuple):
    """The columns of a tensor table, without tensors and addresses: lists during a walk, tuples afterwards."""

    names: Any
    dtypes: Any
    shapes: Any
    changes: Any
    owners: Any
    trails: Any
    plain: Any
    strides: Any
    block_positions: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPart:
    """Consecutive tensors of a walk's table, from number ``first`` on, and their node.

    ``cache_key`` is what must be equal besides fingerprints and ``owners``, which cover all tensors of the module or
    optimizer. ``picked`` are the indices of the stored ones among these (None: all, in order). ``first_at`` maps
    addresses to numbers.
    """

    first: int
    cache_key: tuple[Any, ...]
    owners: list[int]
    fingerprints: Fingerprints
    node: Any
    columns: Columns
    pointers: array[int]
    picked: tuple[int, ...] | None
    first_at: dict[int, int]

    def matches(
        self, first: int, cache_key: tuple[Any, ...], owners: list[int], fingerprints: Fingerprints
    ) -> bool:
        """Whether tensors with these properties, found at this place of a walk, equal this part."""
        return (
            self.first == first
            and self.cache_key == cache_key
            and self.owners == owners
            and self.fingerprints == fingerprints
        )


class WalkCache:
    """Results of the previous walk: its parts and module trees by name, its table's ``columns`` (None if it had aliases
    outside of parts), and its parts by the number of their first tensor."""

    def __init__(self) -> None:
        self._parts: dict[str, CachedPart] = {}
        self.trees: dict[str, KnownModuleTree] = {}
        self.numberings: dict[str, Numbering] = {}
        """Of the previous walk's optimizers, without their parameters."""
        self.columns: Columns | None = None
        self.parts_at: dict[int, CachedPart] = {}

    def find(self, name: str) -> CachedPart | None:
        return self._parts.get(name)

    def remember(self, name: str, part: CachedPart | None) -> None:
        """Store a part, or with None remove it."""
        if part is None:
            self._parts.pop(name, None)
        else:
            self._parts[name] = part

    def forget_others(self, names: Collection[str]) -> None:
        """Remove everything that is not of ``names``."""
        for known in (self._parts, self.trees):
            for name in known.keys() - set(names):
                del known[name]
