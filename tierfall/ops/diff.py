"""What differs between two checkpoints: by the digests of their chunks, which are known without reading them; and by
their values.

Tensors of equal bytes are found by digests if they are at the same place of images that are laid out alike. A chunk
within a tensor whose digest differs shows that the tensor does. A chunk that it shares with others leaves that open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import (
    CONTAINERS_AND_OBJECTS,
    ConflictNode,
    Node,
    QuantizedNode,
    TensorNode,
    ValueNode,
    WrapperNode,
    leaves,
)
from tierfall.core.load.choices import value_blobs
from tierfall.core.restore.reshard import bytes_identity
from tierfall.core.tensors import names as naming
from tierfall.core.tensors.dtypes import name_of
from tierfall.ops.tensors import OpenCheckpoint

COMPARED_BYTES = 64 << 20
"""The most that is compared at once."""
TEXT_MAX = 60
_INTEGERS = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}


class Change(StrEnum):
    """How an entry of two checkpoints differs."""

    DIFFERS = "differs"
    MAY_DIFFER = "may differ"
    FORM = "other form"
    ONLY_A = "only in A"
    ONLY_B = "only in B"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An entry that differs, or may. ``a`` and ``b`` describe it on each side, if that differs. So many ``elements`` of
    a tensor differ, by ``largest`` at most; None: not read."""

    name: str
    change: Change
    a: str | None = None
    b: str | None = None
    elements: int | None = None
    largest: float | None = None


def compare(a: OpenCheckpoint, b: OpenCheckpoint, *, values: bool) -> list[Difference]:
    """Return what differs, by name; with ``values``, tensors of which the digests do not tell are read, and those that
    differ."""
    return sorted(_Comparison(a, b, values).differences(), key=lambda one: one.name)


class _Comparison:
    def __init__(self, a: OpenCheckpoint, b: OpenCheckpoint, values: bool) -> None:
        self._a, self._b, self._values = a, b, values

    def differences(self) -> Iterator[Difference]:
        ours, theirs = _entries(self._a), _entries(self._b)
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            mine, its = ours.get(name), theirs.get(name)
            if isinstance(mine, TensorNode) and isinstance(its, TensorNode):
                yield from self._tensor(name, mine, its)
            elif isinstance(mine, ValueNode) and isinstance(its, ValueNode):
                yield from self._value(name, mine, its)
            elif type(mine) is not type(its) or isinstance(mine, ConflictNode):
                yield self._unlike(name, mine, its)

    def _unlike(self, name: str, a: Node | None, b: Node | None) -> Difference:
        ours, theirs = _describe(self._a.header, a), _describe(self._b.header, b)
        return _between(name, ours, theirs, Change.FORM)

    # ---- tensors

    def _tensor(self, name: str, a: TensorNode, b: TensorNode) -> Iterator[Difference]:
        if _describe(self._a.header, a) != _describe(self._b.header, b):
            yield self._unlike(name, a, b)
        elif found := self._bytes(name, a.position, b.position):
            yield found

    def _bytes(self, name: str, a: int, b: int) -> Difference | None:
        """Compare tensors of one form, or what a value keeps in tensors."""
        ours, theirs = self._a.header.tensors[a], self._b.header.tensors[b]
        if ours.length != theirs.length:
            return Difference(name=name, change=Change.DIFFERS)
        change = self._by_digests(a, b) if ours.length else None
        if change is None:
            return None
        if not self._values:
            return Difference(name=name, change=change)
        elements, largest = 0, 0.0
        for mine, its in self._pieces(a, b):
            item = ours.dtype.itemsize
            differ = (mine.view(-1, item) != its.view(-1, item)).any(1)
            if count := int(differ.sum()):
                elements += count
                one, other = (_numbers(flat, ours.dtype)[differ] for flat in (mine, its))
                step = float((one - other).abs().max())
                largest = step if math.isnan(step) else max(largest, step)
        if not elements:
            return None
        return Difference(name=name, change=Change.DIFFERS, elements=elements, largest=largest)

    def _by_digests(self, a: int, b: int) -> Change | None:
        ours, theirs = [*self._a.blocks(a)], [*self._b.blocks(b)]
        cuts = [[(block.offset, block.lengths) for block, _ in side] for side in (ours, theirs)]
        if cuts[0] != cuts[1]:
            return Change.MAY_DIFFER
        found = None
        for (one, mine), (other, its) in zip(ours, theirs, strict=True):
            start, end, chunk_bytes, digests = bytes_identity(mine, one)
            *place, others = bytes_identity(its, other)
            if [start, end, chunk_bytes] == place and digests == others:
                continue
            found = Change.MAY_DIFFER
            within = slice(1 - start // -chunk_bytes, 1 + end // chunk_bytes)
            if [start, end, chunk_bytes] == place and mine.digests[within] != its.digests[within]:
                return Change.DIFFERS
        return found

    def _pieces(self, a: int, b: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read both tensors, some rows at a time."""
        stored = self._a.header.tensors[a]
        rows, *inner = map(range, stored.shape or (1,))
        count = max(1, COMPARED_BYTES * len(rows) // stored.length)
        for at in range(0, len(rows), count):
            ranges = [rows[at : at + count], *inner][: len(stored.shape)]
            yield self._a.select(a, ranges), self._b.select(b, ranges)

    # ---- values

    def _value(self, name: str, a: ValueNode, b: ValueNode) -> Iterator[Difference]:
        """Yield the entries of plain values that differ, down to those of mappings; arrays in one under its name."""
        values = [value_blobs(one.header, node) for one, node in ((self._a, a), (self._b, b))]
        found = [*_unequal(name, *values)]
        pairs = zip(a.blobs, b.blobs, strict=False)
        inside = {blob.change for pair in pairs if (blob := self._bytes(name, *pair))}
        coded = [one.header.values[node.number] for one, node in ((self._a, a), (self._b, b))]
        if inside or (not found and coded[0] != coded[1]):
            change = Change.MAY_DIFFER if inside == {Change.MAY_DIFFER} else Change.DIFFERS
            found.append(Difference(name=name, change=change))
        yield from found


def _entries(one: OpenCheckpoint) -> dict[str, Node]:
    """Return tensors and plain values by name; of a quantized tensor, and of one of a class, the tensors inside."""
    found: dict[str, Node] = {}
    for name, node in leaves(one.header.tree, "", CONTAINERS_AND_OBJECTS | {WrapperNode}):
        found[name] = node
        if isinstance(node, QuantizedNode):
            found[name] = TensorNode(node.position)
            found |= leaves(node.parameters, f"{name}%parameters", CONTAINERS_AND_OBJECTS)
    return found


def _describe(header: ImageHeader, node: Node | None) -> str | None:
    match node:
        case None:
            return None
        case ValueNode():
            return _text(value_blobs(header, node))
        case TensorNode():
            stored = header.tensors[node.position]
            return f"{name_of(stored.dtype)} {[*stored.shape]}"
        case ConflictNode():
            return node.reason
    return "empty"


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= TEXT_MAX else f"{text[: TEXT_MAX - 3]}..."


def _between(name: str, a: str | None, b: str | None, of_both: Change) -> Difference:
    """Return the difference of two entries that are described; None: there is none."""
    change = Change.ONLY_B if a is None else Change.ONLY_A if b is None else of_both
    return Difference(name=name, change=change, a=a, b=b)


def _unequal(name: str, a: object, b: object) -> Iterator[Difference]:
    if type(a) is type(b) and isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            below = naming.join(name, naming.component(key))
            if key in a and key in b:
                yield from _unequal(below, a[key], b[key])
            else:
                ours, theirs = (_text(each[key]) if key in each else None for each in (a, b))
                yield _between(below, ours, theirs, Change.DIFFERS)
    elif repr(a) != repr(b):
        yield _between(name, _text(a), _text(b), Change.DIFFERS)


def _numbers(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers of flat bytes, exact; of quantized ones, the integers that are stored."""
    typed = flat.view(_INTEGERS.get(dtype, dtype))
    if typed.is_complex():
        return typed.to(torch.complex128)
    return (typed.float() if typed.dtype.itemsize < 4 else typed).double()
