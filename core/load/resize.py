"""Tensors that have another shape in the state than in the checkpoint, as an embedding of more words has.

Both have the same number of dimensions. The block that they have in common, at the low indices, is copied; the rest of
the state's tensor keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def shape_of_state(
    optimizer: Optimizer,
    entry: Any,
    shape: tuple[int, ...],
    saved: StoredTensor | None,
    now: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Return the shape of state that was saved with ``shape``, for a parameter of the shape ``now``; ``saved`` is the
    parameter in the image, if that has it.

    Each dimension that is the parameter's follows it: those of state of the parameter's shape, and of a factor, in
    which others have length 1 or are left out. None if several dimensions fit, or none does.
    """
    if shape and type(optimizer) in _ELEMENTWISE and entry in _PER_ELEMENT:
        return now
    if not shape or saved is None or saved.whole_shape == now:
        return shape
    if saved.whole_shape == shape:
        return now
    if len(saved.whole_shape) != len(now):
        return None
    found = {*_factors(shape, saved.whole_shape, now)}
    return found.pop() if len(found) == 1 else None


def _factors(
    shape: tuple[int, ...], before: tuple[int, ...], now: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that a factor of ``shape`` of a parameter may have now."""
    if not before:
        if not shape:
            yield ()
        return
    yield from _factors(shape, before[1:], now[1:])  # without the first dimension
    for length, follows in ((before[0], now[0]), (1, 1)):
        if shape and shape[0] == length:
            yield from ((follows, *rest) for rest in _factors(shape[1:], before[1:], now[1:]))


def can_resize(stored: StoredTensor, live: torch.Tensor) -> bool:
    """Return whether a stored tensor can be copied into one of another shape: the number of dimensions is equal, and
    the image, or all images merged, have it whole."""
    if stored.is_quantized or len(stored.whole_shape) != live.dim():
        return False
    if stored.shape != stored.whole_shape:
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
