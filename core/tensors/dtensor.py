"""Tensors sharded across ranks: this rank's blocks, and their offsets in the whole.

Supports DTensor, whose module is looked up, never imported; and blocks of any other layout, which the caller places.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tierfall.core.types.errors import ConfigError


class TensorPiece(NamedTuple):
    """The position of a block in a tensor of ``shape``: its offset and its length in each dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return f"a block of {self.lengths} at {self.offset}"


@dataclass(frozen=True, slots=True, eq=False)
class LocalBlocks:
    """This rank's blocks of one tensor, sharded by the caller: plain tensors, each with its position (None: the whole
    tensor). With no blocks, the tensor is still part of the state, and is stored in other ranks' images.

    ``alone``: a block is never stored as an alias, since another rank may hold it for only one of two tied tensors."""

    parts: tuple[tuple[torch.Tensor, TensorPiece | None], ...]
    alone: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the tensor; None without blocks."""
        return self.parts[0][0].dtype if self.parts else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return next((tuple(t.shape) if at is None else at.shape for t, at in self.parts), ())


def block(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    *,
    shape: Sequence[int],
    offset: Sequence[int] | Sequence[Sequence[int]],
) -> LocalBlocks:
    """Make one tensor of ``state`` out of blocks that the ranks hold, in a layout that is no DTensor.

    The whole tensor has ``shape``; ``tensor`` is this rank's block of it, which begins at ``offset``, both counted in
    elements of each dimension. The tensor has as many dimensions as the whole. A rank that holds several blocks passes
    lists of tensors and of offsets, one that holds none empty lists::

        rows = 1024 // world_size
        weight = tierfall.block(tensor, shape=(1024, 512), offset=(rank * rows, 0))
        experts = tierfall.block([third, last], shape=(8, 512, 64), offset=[(3, 0, 0), (7, 0, 0)])
        ckpt.save(step, {"weight": weight, "experts": experts})

    A save captures a block as the tensor itself, lazily if an optimizer steps it. A restore fills the tensors in place,
    each with its region, from any layout. ``load`` returns the whole. Equal blocks of several ranks are stored once.
    Blocks that overlap otherwise, or do not add up to the whole, come back to the ranks that saved them; any other
    layout, and ``load``, raise RestoreError.

    Raises ConfigError for a block that reaches outside of the whole, or has another number of dimensions; for two
    blocks of this rank that overlap or differ in dtype; and for a DTensor, which goes into the state as it is.
    """
    several = isinstance(tensor, list | tuple)
    tensors, offsets = (tensor, offset) if several else ([tensor], [offset])
    if not isinstance(offsets, list | tuple) or len(tensors) != len(offsets):
        raise ConfigError(
            f"block: offset={offset}: expected a list of {len(tensors)}, as of tensors"
        )
    parts = [(t, _place(t, shape, at)) for t, at in zip(tensors, offsets, strict=True)]
    if len(kinds := {str(each.dtype) for each, _ in parts}) > 1:
        raise ConfigError(f"block: the blocks of a tensor are of one dtype, not {sorted(kinds)}")
    if overlap := find_overlap([piece for _, piece in parts]):
        raise ConfigError("block: {} and {} overlap".format(*overlap))
    parts.sort(key=lambda part: part[1].offset)
    return LocalBlocks(tuple(parts))


def _place(tensor: Any, shape: Any, offset: Any) -> TensorPiece:
    what = f"block: {type(tensor).__qualname__}"
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor):
        raise ConfigError(
            f"{what}: expected a plain tensor, or a list of them; a DTensor goes into the state as it is"
        )
    what += f" of shape {tuple(tensor.shape)}, in a whole of shape={shape} at offset={offset}"
    try:
        piece = TensorPiece(*(tuple(map(operator.index, n)) for n in (shape, offset, tensor.shape)))
    except TypeError as error:
        raise ConfigError(f"{what}: expected an integer for each dimension") from error
    if len({*map(len, piece)}) > 1:
        raise ConfigError(
            f"{what}: all need the same number of dimensions: view the tensor with dimensions of length 1, as "
            "tensor.unsqueeze(0) does"
        )
    if any(at < 0 or at + length > end for end, at, length in zip(*piece, strict=True)):
        raise ConfigError(f"{what}: it reaches outside of the whole")
    return piece


def find_overlap(pieces: Sequence[TensorPiece]) -> tuple[TensorPiece, TensorPiece] | None:
    """Two blocks of one tensor that have elements in common, or None. Blocks that are apart along one dimension are not
    compared along the others."""
    waiting = [[piece for piece in pieces if math.prod(piece.lengths)]]
    while waiting:
        pieces = waiting.pop()
        for at in range(len(pieces[0].shape) if len(pieces) > 1 else 0):
            groups: list[list[TensorPiece]] = []
            end = 0
            for piece in sorted(pieces, key=lambda piece: piece.offset[at]):
                if not groups or piece.offset[at] >= end:
                    groups.append([])
                groups[-1].append(piece)
                end = max(end, piece.offset[at] + piece.lengths[at])
            if len(groups) > 1:
                waiting += groups
                break
        else:
            if found := next(filter(_have_common, itertools.combinations(pieces, 2)), None):
                return found
    return None


def _have_common(pair: tuple[TensorPiece, TensorPiece]) -> bool:
    places = zip(*(zip(piece.offset, piece.lengths, strict=True) for piece in pair), strict=True)
    return all(a < b + m and b < a + n for (a, n), (b, m) in places)


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


def local_part(tensor: Any) -> tuple[torch.Tensor, TensorPiece | None]:
    """This rank's part of a DTensor, sharing its memory, or a block, and its position; a plain tensor, and None.
    NotOneBlockError if it is not one block."""
    local, piece = local_tensor(tensor), piece_of(tensor)
    if piece is not None and tuple(local.shape) != piece.lengths:
        raise NotOneBlockError(
            f"its part here is of shape {tuple(local.shape)}, and {piece.lengths} by its placement"
        )
    return local, piece


def local_tensor(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, sharing its memory, or its only block; a plain tensor unchanged."""
    if isinstance(tensor, LocalBlocks):
        return tensor.parts[0][0]
    if not is_sharded(tensor):
        plain: torch.Tensor = tensor
        return plain
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()
    return local


def piece_of(tensor: Any) -> TensorPiece | None:
    """The position of this rank's part, or its only block; None for other values. NotOneBlockError as in
    ``local_part``."""
    if isinstance(tensor, LocalBlocks):
        return tensor.parts[0][1]
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
