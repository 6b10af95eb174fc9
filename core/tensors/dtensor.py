"""A tensor that several ranks hold together: this rank's part of it, and where in the whole that lies.

It knows DTensor, and whatever else tells its chunks by torch's checkpoint protocol (``__create_chunk_list__``), without
loading the module that defines it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class TensorPiece(NamedTuple):
    """A block of a tensor of ``shape``: it begins at ``offset`` and is ``lengths`` long, per dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalBlocks:
    """What this rank holds of one tensor, as whoever cut it says: plain tensors, each with its place (None: all of it).
    Without any the tensor is the state's all the same, and lies in other ranks' images."""

    parts: tuple[tuple[torch.Tensor, TensorPiece | None], ...]


class Branch(dict[str, Any]):
    """A mapping of the state that is walked entry by entry even where it holds no tensors: ranks may have parts of it
    that are to be put together."""


class NotOneBlockError(ValueError):
    """A tensor of several ranks that cannot be taken as one block; the message says why."""


_pieces: dict[Any, TensorPiece] = {}
_PIECES_MAX = 100_000


def is_sharded(tensor: object) -> bool:
    """Say whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(values: Iterable[object]) -> bool:
    """Say whether a DTensor is among many values: asked of their types, this is the inner loop of every save."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    return any(issubclass(kind, module.DTensor) for kind in set(map(type, values)))


def local_part(tensor: Any) -> tuple[torch.Tensor, TensorPiece]:
    """Return the memory of this rank's part of a DTensor, and where it lies. Raises Unsharded where that is not one
    block of the whole."""
    local = local_tensor(tensor)
    piece = _block(tensor)
    if tuple(local.shape) != piece.lengths:
        raise NotOneBlockError(
            f"its part here is of shape {tuple(local.shape)}, and its placement says {piece.lengths}"
        )
    return local, piece


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return the memory of this rank's part of a DTensor; a plain tensor as it is."""
    if not is_sharded(tensor):
        plain: torch.Tensor = tensor
        return plain
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def piece_of(tensor: Any) -> TensorPiece | None:
    """Return where this rank's part lies; None for what is no DTensor. Raises Unsharded as ``local_part`` does."""
    return _block(tensor) if is_sharded(tensor) else None


def like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Make a DTensor of this rank's part, placed as ``parameter`` is."""
    made: torch.Tensor = type(parameter.data).from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made


def _block(tensor: Any) -> TensorPiece:
    here = tensor.device_mesh.get_coordinate()
    if here is None:
        raise NotOneBlockError(
            "this rank is not in its mesh, and has no part of it; leave it out here"
        )
    # A process may come back as another rank of a mesh that is otherwise the same.
    key = (tensor.device_mesh, tuple(here), tensor.placements, tensor.shape)
    known = _pieces.get(key)
    if known is not None:
        return known
    if any(placement.is_partial() for placement in tensor.placements):
        raise NotOneBlockError(
            "its parts are summands of the whole (Partial); redistribute it first"
        )
    chunks = tensor.__create_chunk_list__()
    if len(chunks) != 1:
        raise NotOneBlockError(f"this rank holds {len(chunks)} blocks of it, expected one")
    piece = TensorPiece(tuple(tensor.shape), tuple(chunks[0].offsets), tuple(chunks[0].sizes))
    if len(_pieces) >= _PIECES_MAX:  # of shapes that never come again
        _pieces.clear()
    _pieces[key] = piece
    return piece
