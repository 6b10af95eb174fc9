"""The tensors that a walk meets: each stored once, under a name that no other has.

Aliases (the same memory, read as the same dtype, shape and strides) are one tensor; views that overlap in part are
whole tensors each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tierfall.core.image import naming, tensors
from tierfall.core.image.naming import Trail
from tierfall.core.values import Changes


class SourceTensor(NamedTuple):
    """One stored tensor: its name in the image, itself (detached), when it may change, and where it stands."""

    name: str
    tensor: torch.Tensor
    changes: Changes
    trail: Trail

    @property
    def path(self) -> str:
        """Where the tensor stands, as Python code would reach it: ``state["model"]["layer.weight"]``."""
        return naming.path(self.trail)


class TensorTable:
    """Numbers tensors in the order in which they are met. Plain lists: this is the inner loop of every save."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []
        self.shapes: list[tuple[int, ...]] = []
        self._tensors: list[torch.Tensor] = []
        self._changes: list[Changes] = []
        self._trails: list[Trail] = []
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
    ) -> int:
        """Take a tensor in and return its number; an alias of an earlier one gets that one's."""
        pointer = tensor.data_ptr()
        number = len(self.names)
        if pointer and tensor.numel():
            first = self._first_at.setdefault(pointer, number)
            if first != number:
                alias = self._alias(pointer, first, tensor, dtype, shape)
                if alias is not None:
                    if changes is Changes.ANYTIME:
                        self._changes[alias] = changes
                    return alias
                self._more_at.setdefault(pointer, []).append(number)
        if name in self._taken:
            # Only keys that a state_dict made up can meet. No key has a bare %, so this name is free.
            name = f"{name}%d{number}"
        self._taken.add(name)
        self.names.append(name)
        self.dtypes.append(dtype)
        self.shapes.append(shape)
        self._tensors.append(tensor)
        self._changes.append(changes)
        self._trails.append(trail)
        return number

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
                and tensors.same_memory(self._tensors[other], tensor)
            ):
                return other
        return None

    def sources(self) -> tuple[SourceTensor, ...]:
        return tuple(map(SourceTensor, self.names, self._tensors, self._changes, self._trails))
