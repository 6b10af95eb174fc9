"""The table of a walk's tensors: each is stored once, under a unique name.

Aliases (same memory, dtype, shape and strides) share a row; views that overlap partially have a row each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tierfall.core.state.view import DECLARED, NO_OWNER
from tierfall.core.state.walk_cache import CachedPart, Columns, WalkCache, take_fingerprints
from tierfall.core.tensors import tensors
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.tensors.names import Trail
from tierfall.core.types.values import Changes

T = TypeVar("T")


class TensorTable:
    """Numbers tensors in the order of the walk. Plain lists: this is the inner loop of every save.

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
        owners: list[int],
        entries: Sequence[torch.Tensor],
        node: Any,
    ) -> CachedPart | None:
        """Describe the rows from number ``first`` on, which were added from ``entries``, for reuse by the next walk.

        None if the stored tensors are not among ``entries``, or one is an alias of an earlier row.
        """
        self._diverge()
        fingerprints = take_fingerprints(entries)
        if fingerprints is None or any(dtype.is_complex for dtype in self._columns.dtypes[first:]):
            return None  # fingerprints do not include lazy conjugation
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
            owners=owners,
            fingerprints=fingerprints._replace(
                shapes=_interned(fingerprints.shapes), strides=_interned(fingerprints.strides)
            ),
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
            and row == tuple(column[number] for column in before)
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
                if columns.pieces[other] == piece:
                    return other
                break
        self._more_at.setdefault(address, []).append(number)
        return None


def _interned(values: Sequence[T]) -> list[T]:
    """The same values with equal ones as one object, since comparing identical objects is fast."""
    known: dict[T, T] = {}
    return [known.setdefault(value, value) for value in values]
