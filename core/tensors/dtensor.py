"""Tensors sharded across ranks: this rank's block, and its offset in the whole.

Supports DTensor, and other types that implement ``__create_chunk_list__`` of torch's checkpoint protocol. The module
that defines DTensor is looked up, never imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class TensorPiece(NamedTuple):
    """The position of a block in a tensor of ``shape``: its offset and its length in each dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalBlocks:
    """This rank's blocks of one tensor, sharded by the caller: plain tensors, each with its position (None: the whole
    tensor). With no blocks, the tensor is still part of the state, and is stored in other ranks' images."""

    parts: tuple[tuple[torch.Tensor, TensorPiece | None], ...]


class Branch(dict[str, Any]):
    """A mapping that is walked entry by entry even if it contains no tensors, because ranks may hold different entries,
    which a restore merges."""


class NotOneBlockError(ValueError):
    """A sharded tensor whose local part is not one block; the message has the reason."""


_pieces: dict[Any, TensorPiece] = {}
_PIECES_MAX = 100_000


def is_sharded(tensor: object) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(values: Iterable[object]) -> bool:
    """Whether a DTensor is among the values. Examines only the set of their types: this is the inner loop of a save."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    return any(issubclass(kind, module.DTensor) for kind in set(map(type, values)))


def local_part(tensor: Any) -> tuple[torch.Tensor, TensorPiece]:
    """This rank's part of a DTensor, sharing its memory, and its position. NotOneBlockError if it is not one block."""
    local = local_tensor(tensor)
    piece = _block(tensor)
    if tuple(local.shape) != piece.lengths:
        raise NotOneBlockError(
            f"its part here is of shape {tuple(local.shape)}, and {piece.lengths} by its placement"
        )
    return local, piece


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory; a plain tensor unchanged."""
    if not is_sharded(tensor):
        plain: torch.Tensor = tensor
        return plain
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def piece_of(tensor: Any) -> TensorPiece | None:
    """The position of this rank's part; None for other values. NotOneBlockError as in ``local_part``."""
    return _block(tensor) if is_sharded(tensor) else None


def is_block(live: torch.Tensor, piece: TensorPiece | None) -> bool:
    """Whether this rank's part of a tensor is at that position; None: it is no part."""
    try:
        return piece_of(live) == piece
    except NotOneBlockError:
        return False


def as_dtensor_like(parameter: Any, local: torch.Tensor) -> torch.Tensor:
    """Build a DTensor from this rank's part, with mesh, placements and shape of ``parameter``."""
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
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise NotOneBlockError(
            "this rank is not in its mesh, and has no part of it; leave it out of the state on this rank"
        )
    # With the coordinate: a process may become another rank of an equal mesh.
    key = (tensor.device_mesh, tuple(coordinate), tensor.placements, tensor.shape)
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
    if len(_pieces) >= _PIECES_MAX:  # of shapes that do not recur
        _pieces.clear()
    _pieces[key] = piece
    return piece
