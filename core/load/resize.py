"""Tensors that have another shape in the state than in the checkpoint, as an embedding of more words has.

Both have the same number of dimensions. The block that they have in common, at the low indices, is copied; the rest of
the state's tensor keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tierfall.core.image.header import StoredTensor
from tierfall.core.load.build import Builder
from tierfall.core.tensors.dtensor import NotOneBlockError, is_sharded, local_part, piece_of

_ELEMENTWISE = frozenset(
    getattr(torch.optim, name, None)
    for name in (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD", "SparseAdam"),
    )
)
_PER_ELEMENT = frozenset(
    (
        *("acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq"),
        *("momentum_buffer", "prev", "square_avg", "step_size", "sum"),
    )
)
"""The entries of their state that have the shape of the parameter."""


def has_shape_of_parameter(
    optimizer: Optimizer, entry: Any, shape: tuple[int, ...], stored: StoredTensor | None
) -> bool:
    """Return whether state of this shape was saved with that of its parameter, which is ``stored`` in the image."""
    known = type(optimizer) in _ELEMENTWISE and entry in _PER_ELEMENT
    return known or (stored is not None and stored.whole_shape == shape)


def can_resize(stored: StoredTensor, live: torch.Tensor) -> bool:
    """Return whether a stored tensor can be copied into one of another shape: the number of dimensions is equal, and
    the image, or all images merged, have it whole."""
    if stored.is_quantized or len(stored.whole_shape) != live.dim():
        return False
    if stored.piece is not None and stored.piece.lengths != stored.piece.shape:
        return False
    try:
        piece_of(live)
    except NotOneBlockError:
        return False
    return True


def part_of(live: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's part of a tensor, and its offset in the whole one."""
    if not is_sharded(live):
        return live, (0,) * live.dim()
    local, piece = local_part(live)
    return local, piece.offset


def plan_common(
    builder: Builder, position: int, local: torch.Tensor, offset: tuple[int, ...]
) -> Callable[[], None]:
    """Plan to read a stored tensor, and return what copies the part that ``local``, at ``offset``, has in common with
    it."""
    whole = builder.tensor(position, local.device)
    ends = [min(o + n, end) for o, n, end in zip(offset, local.shape, whole.shape, strict=True)]
    source = tuple(slice(o, max(o, end)) for o, end in zip(offset, ends, strict=True))
    target = tuple(slice(0, max(0, end - o)) for o, end in zip(offset, ends, strict=True))

    def copy() -> None:
        with torch.no_grad():
            local[target].copy_(whole[source])

    return copy
