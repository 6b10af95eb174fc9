"""The tensors that a walk meets: each stored once, under a name that no other has.

Aliases (the same memory, read as the same dtype, shape and strides) are one tensor; views that overlap in part are
whole tensors each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from tierfall.core.image import tensors
from tierfall.core.image.naming import Trail
from tierfall.core.image.recall import Part, look
from tierfall.core.image.sharded import Piece
from tierfall.core.image.view import NO_OWNER
from tierfall.core.values import Changes

T = TypeVar("T")


class TensorTable:
    """Numbers tensors in the order in which they are met. Plain lists: this is the inner loop of every save."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[tuple[int, ...]] = []
        self.tensors: list[torch.Tensor] = []
        self.pointers = array("Q")
        self.changes: list[Changes] = []
        self.owners: list[int] = []
        self.trails: list[Trail] = []
        self.plain: list[bool] = []
        self.strides: list[tuple[int, ...] | None] = []
        self.pieces: list[Piece | None] = []
        self._taken: set[str] = set()
        self._first_at: dict[int, int] = {}
        self._more_at: dict[int, list[int]] = {}

    def add(
        self,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        name: str,
        changes: Changes,
        trail: Trail,
        piece: Piece | None = None,
        *,
        owner: int = NO_OWNER,
        alone: bool = False,
    ) -> int:
        """Take a tensor in and return its number; an alias of an earlier one gets that one's, unless it is to be stored
        ``alone``. ``piece`` says where it lies in a tensor that several ranks hold together, ``owner`` whose step
        changes it (``StateView.owners``)."""
        pointer = tensor.data_ptr()
        number = len(self.names)
        if pointer and tensor.numel() and not alone:
            first = self._first_at.setdefault(pointer, number)
            if first != number:
                alias = self._alias(pointer, first, tensor, dtype, shape)
                if alias is not None and self.pieces[alias] == piece:
                    if changes is Changes.ANYTIME:
                        self.changes[alias], self.owners[alias] = changes, NO_OWNER
                    return alias
                self._more_at.setdefault(pointer, []).append(number)
        if name in self._taken:
            # Only keys that a state_dict made up can meet. No key has a bare %, so this name is free.
            name = f"{name}%d{number}"
        self._taken.add(name)
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self.tensors.append(tensor)
        self.pointers.append(pointer)
        self.changes.append(changes)
        self.owners.append(owner)
        self.trails.append(trail)
        plain = tensors.is_plain(tensor, dtype)
        self.plain.append(plain)
        self.strides.append(None if plain else tensors.dense_strides(tensor))
        self.pieces.append(piece)
        return number

    def part(
        self, first: int, about: tuple[Any, ...], met: Sequence[torch.Tensor], node: Any
    ) -> Part | None:
        """Describe the tensors from number ``first`` on, which came from ``met``, so that they may be recalled.

        None where ``met`` are not what was stored, or one was stored before.
        """
        looks = look(met)
        if looks is None or any(dtype.is_complex for dtype in self.dtypes[first:]):
            return None  # whether a complex one is conjugated, looks do not tell
        places = {id(tensor): place for place, tensor in enumerate(met)}
        picked = [places.get(id(tensor)) for tensor in self.tensors[first:]]
        first_at = {at: self._first_at[at] for at in looks.pointers if at in self._first_at}
        if None in picked or min(first_at.values(), default=first) < first:
            return None
        if not self._more_at.keys().isdisjoint(first_at):  # several begin at one address
            return None
        return Part(
            first=first,
            about=about,
            looks=looks._replace(shapes=_once(looks.shapes), strides=_once(looks.strides)),
            node=node,
            names=tuple(self.names[first:]),
            dtypes=tuple(self.dtypes[first:]),
            shapes=tuple(self.shapes[first:]),
            pointers=self.pointers[first:],
            changes=tuple(self.changes[first:]),
            trails=tuple(self.trails[first:]),
            plain=tuple(self.plain[first:]),
            strides=tuple(self.strides[first:]),
            pieces=tuple(self.pieces[first:]),
            picked=tuple(picked),  # type: ignore[arg-type]
            first_at=first_at,
        )

    def take(self, part: Part, met: Sequence[torch.Tensor], owners: Sequence[int]) -> bool:
        """Take the tensors of a part in again, with the ``owners`` of all that were ``met``; False where one of them,
        or of their names, stands here already."""
        if not self._taken.isdisjoint(part.names) or not self._first_at.keys().isdisjoint(
            part.first_at
        ):
            return False
        self._taken.update(part.names)
        self._first_at.update(part.first_at)
        self.names += part.names
        self.dtypes += part.dtypes
        self.shapes += part.shapes
        self.pointers += part.pointers
        self.changes += part.changes
        self.trails += part.trails
        self.plain += part.plain
        self.strides += part.strides
        self.pieces += part.pieces
        self.tensors += [met[place] for place in part.picked]
        self.owners += [owners[place] for place in part.picked]
        return True

    def _alias(
        self,
        pointer: int,
        first: int,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, ...],
    ) -> int | None:
        other: int
        for other in (first, *self._more_at.get(pointer, ())):
            if (
                self.dtypes[other] is dtype
                and self.shapes[other] == shape
                and tensors.same_memory(self.tensors[other], tensor)
            ):
                return other
        return None


def _once(values: Sequence[T]) -> list[T]:
    """The same values, equal ones as one object: to compare with few objects is fast."""
    known: dict[T, T] = {}
    return [known.setdefault(value, value) for value in values]
