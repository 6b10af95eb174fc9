"""The tensors that a walk meets: each stored once, under a name that no other has.

Aliases (the same memory, read as the same dtype, shape and strides) are one tensor; views that overlap in part are
whole tensors each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tierfall.core.state.view import NO_OWNER
from tierfall.core.state.walk_cache import CachedPart, Columns, WalkCache, take_fingerprints
from tierfall.core.tensors import tensors
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.tensors.names import Trail
from tierfall.core.types.values import Changes

T = TypeVar("T")


class TensorTable:
    """Numbers tensors in the order in which they are met. Plain lists: this is the inner loop of every save.

    As long as a walk meets what the one before met, row for row, the columns are that one's, and none is written.
    """

    def __init__(self, recall: WalkCache) -> None:
        self.tensors: list[torch.Tensor] = []
        self.pointers = array("Q")
        self._recall = recall
        self._repeated = recall.columns
        """The columns of the walk before, as long as this one repeats it."""
        self._columns = Columns([], [], [], [], [], [], [], [], [])
        self._parts: dict[int, CachedPart] = {}
        self._taken: set[str] = set()
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
        """Take a tensor in and return its number; an alias of an earlier one gets that one's, unless it is to be stored
        ``alone``. ``piece`` says where it lies in a tensor that several ranks hold together, ``owner`` whose step
        changes it (``StateView.owners``)."""
        pointer = tensor.data_ptr()
        number = len(self.tensors)
        address = pointer if tensor.numel() and not alone else 0
        plain = tensors.is_plain(tensor, dtype)
        strides = None if plain else tensors.dense_strides(tensor)
        row = (name, dtype, shape, changes, owner, trail, plain, strides, piece)
        if self._repeats(number, row, address):
            if address:
                self._first_at[address] = number
        else:
            self._depart()
            alias = self._alias(address, number, tensor, row) if address else None
            if alias is not None:
                self._has_aliases = True
                if changes is Changes.ANYTIME:
                    self._columns.changes[alias] = changes
                    self._columns.owners[alias] = NO_OWNER
                return alias
            if name in self._taken:
                # Only keys that a state_dict made up can meet. No key has a bare %, so this name is free.
                row = (f"{name}%d{number}", *row[1:])
            self._taken.add(row[0])
            for column, value in zip(self._columns, row, strict=True):
                column.append(value)
        self.tensors.append(tensor)
        self.pointers.append(pointer)
        return number

    def part(
        self,
        first: int,
        about: tuple[Any, ...],
        owners: list[int],
        met: Sequence[torch.Tensor],
        node: Any,
    ) -> CachedPart | None:
        """Describe the tensors from number ``first`` on, which came from ``met``, so that they may be recalled.

        None where ``met`` are not what was stored, or one was stored before.
        """
        self._depart()
        looks = take_fingerprints(met)
        if looks is None or any(dtype.is_complex for dtype in self._columns.dtypes[first:]):
            return None  # whether a complex one is conjugated, looks do not tell
        places = {id(tensor): place for place, tensor in enumerate(met)}
        picked = [places.get(id(tensor)) for tensor in self.tensors[first:]]
        first_at = {at: self._first_at[at] for at in looks.pointers if at in self._first_at}
        if None in picked or min(first_at.values(), default=first) < first:
            return None
        if not self._more_at.keys().isdisjoint(first_at):  # several begin at one address
            return None
        part = self._parts[first] = CachedPart(
            first=first,
            about=about,
            owners=owners,
            looks=looks._replace(shapes=_once(looks.shapes), strides=_once(looks.strides)),
            node=node,
            columns=Columns(*(tuple(column[first:]) for column in self._columns)),
            pointers=self.pointers[first:],
            picked=None if picked == [*range(len(met))] else tuple(picked),  # type: ignore[arg-type]
            first_at=first_at,
        )
        return part

    def take(self, part: CachedPart, met: Sequence[torch.Tensor]) -> bool:
        """Take the tensors of a part in again, out of all that were ``met``; False where one of them, or of their
        names, stands here already."""
        first = len(self.tensors)
        # What stood beside it at the walk before, and is where it was, is not to be compared with it again.
        repeats = self._repeated is not None and self._recall.parts_at.get(first) is part
        if not repeats:
            self._depart()
        if not self._first_at.keys().isdisjoint(part.first_at.keys()):
            return False
        if not repeats:
            if not self._taken.isdisjoint(part.columns.names):
                return False
            self._take_columns(part)
        self._parts[first] = part
        self.pointers += part.pointers
        self.tensors += met if part.picked is None else [met[place] for place in part.picked]
        return True

    def finish(self) -> Columns:
        """Return the columns of all that was met, which the next walk may repeat."""
        if self._repeated is None or len(self._repeated.names) != len(self.tensors):
            self._depart()
            columns = Columns(*map(tuple, self._columns))
        else:
            columns = self._repeated
        self._recall.columns = None if self._has_aliases else columns
        self._recall.parts_at = self._parts
        return columns

    # ---- the walk before

    def _repeats(self, number: int, row: tuple[Any, ...], address: int) -> bool:
        """Say whether a row is what stood there at the walk before, and no alias. An ``address`` of 0 is none."""
        before = self._repeated
        return (
            before is not None
            and number < len(before.names)
            and row == tuple(column[number] for column in before)
            and address not in self._first_at
            and not any(address in part.first_at for part in self._parts.values())
        )

    def _depart(self) -> None:
        """Write down what was met so far: from here on this walk is another than the one before."""
        before, self._repeated = self._repeated, None
        if before is None:
            return
        for column, rows in zip(self._columns, before, strict=True):
            column.extend(rows[: len(self.tensors)])
        self._taken.update(self._columns.names)
        for part in self._parts.values():
            self._first_at.update(part.first_at)

    def _take_columns(self, part: CachedPart) -> None:
        for column, rows in zip(self._columns, part.columns, strict=True):
            column.extend(rows)
        self._taken.update(part.columns.names)
        self._first_at.update(part.first_at)

    def _alias(
        self, address: int, number: int, tensor: torch.Tensor, row: tuple[Any, ...]
    ) -> int | None:
        """Return the number of an earlier tensor that is the same memory, read alike; else note that another begins
        here."""
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


def _once(values: Sequence[T]) -> list[T]:
    """The same values, equal ones as one object: to compare with few objects is fast."""
    known: dict[T, T] = {}
    return [known.setdefault(value, value) for value in values]
