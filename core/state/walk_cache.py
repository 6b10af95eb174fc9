"""The table of a walk's tensors, and the results of a walk that the next walk reuses: the tensors of a module or an
optimizer whose memory has not moved.

A part has only the addresses, shapes, strides and dtypes of its tensors, never a reference, so that memory which the
training releases is freed. A part is reused only if everything that a walk examines is unchanged. If nothing but
tensors determines a module's ``state_dict`` (``modules.tree_of``), the method is not called.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch

from tierfall.core.state.modules import KnownModuleTree
from tierfall.core.state.optimizers import Numbering
from tierfall.core.state.view import DECLARED, NO_OWNER
from tierfall.core.tensors import tensors
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.tensors.names import Trail
from tierfall.core.types.values import Changes

_POINTER = torch.Tensor.data_ptr
_NESTED = attrgetter("is_nested")


def _find_guards() -> Any:
    """Return torch's class that compares many tensors in one call; None if this torch has none."""
    try:
        guards: Any = torch._C._dynamo.guards.TensorGuards
        one = torch.empty(1, device="cpu")  # not the default device: an import must not start CUDA
        guards(one, dynamic_dims_sizes=[[1]], dynamic_dims_strides=[[1]]).check(one)
    except (AttributeError, TypeError, RuntimeError):
        return None
    return guards


_Guards = _find_guards()


class Fingerprints:
    """The addresses of tensors, and how torch interprets their memory: type, device, dtype, shape, strides, lazy
    conjugation. It has no reference to a tensor."""

    def __init__(self, entries: Sequence[torch.Tensor]) -> None:
        """Raises RuntimeError if one of the tensors has no address or strides."""
        self.pointers = [*map(_POINTER, entries)]
        self._has_repeats = len({*map(id, entries)}) < len(entries)
        self._guards = _Guards(
            *self._distinct(entries),
            dynamic_dims_sizes=[[*each.shape] for each in entries],
            dynamic_dims_strides=[[*each.stride()] for each in entries],
        )

    def are_of(self, entries: Sequence[torch.Tensor]) -> bool:
        """Whether these tensors have the same fingerprints."""
        try:
            pointers = [*map(_POINTER, entries)]
        except (RuntimeError, TypeError):  # one has no address, or is no tensor
            return False
        # The guards would end the process at a nested tensor.
        is_plain = pointers == self.pointers and not any(map(_NESTED, entries))
        return is_plain and bool(self._guards.check(*self._distinct(entries)))

    def _distinct(self, entries: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The guards accept no object twice."""
        return [*map(torch.Tensor.detach, entries)] if self._has_repeats else entries


def take_fingerprints(entries: Sequence[torch.Tensor]) -> Fingerprints | None:
    """The fingerprints of tensors. None if one of them is not a plain strided tensor; and if torch has no guards, so
    that each save walks all of the state."""
    if _Guards is None or set(map(type, entries)) != {torch.Tensor} or any(map(_NESTED, entries)):
        return None
    try:
        return Fingerprints(entries)
    except RuntimeError:  # a sparse tensor
        return None


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

    ``cache_key`` must be equal, as must the fingerprints, which cover all tensors of the module or optimizer.
    ``picked`` are the indices of the stored ones among these (None: all, in order). ``first_at`` maps addresses to
    numbers.
    """

    first: int
    cache_key: tuple[Any, ...]
    fingerprints: Fingerprints
    node: Any
    columns: Columns
    pointers: array[int]
    picked: tuple[int, ...] | None
    first_at: dict[int, int]


class WalkCache:
    """Results of the previous walk: its parts and module trees by name, its table's ``columns`` (None if it had aliases
    outside of parts), and its parts by the number of their first tensor."""

    def __init__(self) -> None:
        self._parts: dict[str, CachedPart] = {}
        self.trees: dict[str, KnownModuleTree | None] = {}
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
                known.pop(name)


class TensorTable:
    """The table of a walk's tensors, in the order of the walk: each is stored once, under a unique name. Aliases (same
    memory, dtype, shape and strides) share a row; views that overlap partially have a row each. Plain lists: this is
    the inner loop of every save.

    While a walk repeats the rows of the previous one, it writes no columns and keeps those.
    """

    def __init__(self, cache: WalkCache) -> None:
        self.tensors: list[torch.Tensor] = []
        self.pointers = array("Q")
        self._cache = cache
        self._previous = cache.columns
        """The columns of the previous walk, until this one differs."""
        self._columns = Columns([], [], [], [], [], [], [], [], [])
        self._parts: dict[int, CachedPart] = {}
        self._used_names: set[str] = set()
        self._first_at: dict[int, int] = {}
        self._more_at: dict[int, list[int]] = {}
        self._has_aliases = False

    def add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        changes: Changes,
        trail: Trail,
        piece: TensorPiece | None = None,
        *,
        owner: int = NO_OWNER,
        alone: bool = False,
    ) -> int:
        """Add a tensor and return its number; an alias gets that of the earlier tensor, unless ``alone``. ``piece`` is
        its position in a sharded tensor, ``owner`` as in ``StateView.owners``."""
        pointer = tensor.data_ptr()
        number = len(self.tensors)
        address = pointer if tensor.numel() and not alone else 0
        plain = tensors.is_plain(tensor, dtype)
        strides = None if plain else tensors.dense_strides(tensor)
        row = (name, dtype, shape, changes, owner, trail, plain, strides, piece)
        if self._is_repeat(number, row, address):
            if address:
                self._first_at[address] = number
        else:
            self._diverge()
            alias = self._alias(address, number, tensor, row) if address else None
            if alias is not None:
                self._has_aliases = True
                self._apply_stricter(alias, changes, owner)
                return alias
            if name in self._used_names:
                # Only keys that hooks add to a state_dict can collide. No encoded key has a bare %: the name is free.
                row = (f"{name}%d{number}", *row[1:])
            self._used_names.add(row[0])
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)
        self.tensors.append(tensor)
        self.pointers.append(pointer)
        return number

    def _apply_stricter(self, number: int, changes: Changes, owner: int) -> None:
        """Memory that occurs twice follows the stricter rule. A parameter stays its owner, unless the user declared
        that it changes at any time."""
        rows = self._columns
        rules = (rows.changes[number], rows.owners[number]), (changes, owner)
        if Changes.ANYTIME not in (changes, rows.changes[number]):
            return
        rows.changes[number] = Changes.ANYTIME
        if (Changes.ANYTIME, DECLARED) in rules:
            rows.owners[number] = DECLARED
        else:
            parameter = max(owner, rows.owners[number])
            rows.owners[number] = parameter if parameter > DECLARED else NO_OWNER

    def cache_part(
        self,
        first: int,
        cache_key: tuple[Any, ...],
        entries: Sequence[torch.Tensor],
        node: Any,
    ) -> CachedPart | None:
        """Describe the rows from number ``first`` on, which were added from ``entries``, for reuse by the next walk.

        None if the stored tensors are not among ``entries``, or one is an alias of an earlier row.
        """
        self._diverge()
        fingerprints = take_fingerprints(entries)
        if fingerprints is None:
            return None
        places = {id(tensor): place for place, tensor in enumerate(entries)}
        picked = [places.get(id(tensor)) for tensor in self.tensors[first:]]
        first_at = {at: self._first_at[at] for at in fingerprints.pointers if at in self._first_at}
        if None in picked or min(first_at.values(), default=first) < first:
            return None
        if not self._more_at.keys().isdisjoint(first_at):  # several tensors start at one address
            return None
        part = self._parts[first] = CachedPart(
            first=first,
            cache_key=cache_key,
            fingerprints=fingerprints,
            node=node,
            columns=Columns(*(tuple(column[first:]) for column in self._columns)),
            pointers=self.pointers[first:],
            picked=None if picked == [*range(len(entries))] else tuple(picked),  # type: ignore[arg-type]
            first_at=first_at,
        )
        return part

    def reuse(self, part: CachedPart, entries: Sequence[torch.Tensor]) -> bool:
        """Add the rows of a cached part, with tensors out of ``entries``; False if the table already has one of the
        addresses or names."""
        first = len(self.tensors)
        # Rows that the previous walk already compared with this part need no comparison.
        repeats = self._previous is not None and self._cache.parts_at.get(first) is part
        if not repeats:
            self._diverge()
        if not self._first_at.keys().isdisjoint(part.first_at.keys()):
            return False
        if not repeats:
            if not self._used_names.isdisjoint(part.columns.names):
                return False
            self._append_columns(part)
        self._parts[first] = part
        self.pointers += part.pointers
        self.tensors += (
            entries if part.picked is None else [entries[place] for place in part.picked]
        )
        return True

    def finish(self) -> Columns:
        """The columns of all rows; stored in the cache for the next walk."""
        if self._previous is None or len(self._previous.names) != len(self.tensors):
            self._diverge()
            columns = Columns(*map(tuple, self._columns))
        else:
            columns = self._previous
        self._cache.columns = None if self._has_aliases else columns
        self._cache.parts_at = self._parts
        return columns

    # ---- repeating the previous walk

    def _is_repeat(self, number: int, row: tuple[Any, ...], address: int) -> bool:
        """Whether a row equals that of the previous walk, and is no alias. An ``address`` of 0 means none."""
        before = self._previous
        return (
            before is not None
            and number < len(before.names)
            and row == tuple(map(itemgetter(number), before))
            and address not in self._first_at
            and not any(address in part.first_at for part in self._parts.values())
        )

    def _diverge(self) -> None:
        """Copy the rows so far from the previous walk's columns: from here on this walk differs."""
        before, self._previous = self._previous, None
        if before is None:
            return
        for column, rows in zip(self._columns, before, strict=True):
            column.extend(rows[: len(self.tensors)])
        self._used_names.update(self._columns.names)
        for part in self._parts.values():
            self._first_at.update(part.first_at)

    def _append_columns(self, part: CachedPart) -> None:
        for column, rows in zip(self._columns, part.columns, strict=True):
            column.extend(rows)
        self._used_names.update(part.columns.names)
        self._first_at.update(part.first_at)

    def _alias(
        self, address: int, number: int, tensor: torch.Tensor, row: tuple[Any, ...]
    ) -> int | None:
        """The number of an earlier alias of this tensor; None, after recording the address, if there is none."""
        _, dtype, shape, _, _, _, _, _, piece = row
        first = self._first_at.setdefault(address, number)
        if first == number:
            return None
        columns = self._columns
        other: int
        for other in (first, *self._more_at.get(address, ())):
            if (
                columns.dtypes[other] is dtype
                and columns.shapes[other] == shape
                and tensors.same_memory(self.tensors[other], tensor)
            ):
                if columns.block_positions[other] == piece:
                    return other
                break
        self._more_at.setdefault(address, []).append(number)
        return None
