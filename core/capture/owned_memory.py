"""Which tensors of a state only the steps of an optimizer change, although they are no object's in the state.

A ``state_dict()`` is captured as the module or the optimizer itself would be. Addresses are compared while all tensors
of both sides are alive, so that none of them can belong to memory that was freed meanwhile.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from tierfall.core.state.view import NO_OWNER, StateView
from tierfall.core.tensors.dtensor import local_tensor
from tierfall.core.tensors.tensors import are_dense, span
from tierfall.core.tensors.wrappers import inner_tensors
from tierfall.core.types.values import Changes

_PLAIN = frozenset({torch.Tensor, nn.Parameter})


def tensors_in(
    view: StateView, owned: Sequence[torch.Tensor], parameters: Collection[int]
) -> list[int]:
    """The numbers of a view's tensors that may change at any time by their place in the state, but whose memory is
    entirely in that of one tensor of ``owned``, or is a parameter's, whose id is in ``parameters``.

    ``owned`` are parameters and optimizer state, DTensors and wrappers among them. One with gaps in its memory owns
    nothing here: what is in the gaps may change at any time.
    """
    changing = [n for n, changes in enumerate(view.changes) if changes is Changes.ANYTIME]
    by_address = _by_address(owned) if changing else {}
    addresses = sorted(by_address)
    return [
        number
        for number in changing
        if view.owners[number] in parameters
        or (
            view.owners[number] == NO_OWNER
            and _is_inside(view.sources[number], view.pointers[number], addresses, by_address)
        )
    ]


def _by_address(owned: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    if not set(map(type, owned)) <= _PLAIN:
        owned = [*map(local_tensor, chain.from_iterable(map(inner_tensors, owned)))]
    strided = [each for each in owned if each.layout is torch.strided]
    strided.sort(key=torch.Tensor.numel)  # of tensors that start at one address, the largest
    return dict(zip(map(torch.Tensor.data_ptr, strided), strided, strict=True))


def _is_inside(
    tensor: torch.Tensor,
    address: int,
    addresses: Sequence[int],
    by_address: Mapping[int, torch.Tensor],
) -> bool:
    at = bisect.bisect_right(addresses, address) - 1
    if not address or at < 0 or not tensor.numel():
        return False
    owner = by_address[addresses[at]]
    return (
        owner.numel() > 0
        and _end(tensor) <= _end(owner)
        and owner.device == tensor.device
        and (owner.is_contiguous() or are_dense(owner.shape, owner.stride()))
    )


def _end(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():  # the usual case, in a loop over all tensors of a state
        return tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return span(tensor)[1]
