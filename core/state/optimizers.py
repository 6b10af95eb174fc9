"""Torch optimizers: which are stock, and the numbers and names of their parameters.

A stock optimizer is saved and restored tensor by tensor, since ``load_state_dict`` casts state to the parameter's
dtype. For one whose class, object or hooks change ``state_dict`` or ``load_state_dict``, these methods are called.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch.optim import Optimizer

from tierfall.core.state.modules import Scans


def is_stock(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    if kind.state_dict is not Optimizer.state_dict:
        return False
    if kind.load_state_dict is not Optimizer.load_state_dict:
        return False
    own = optimizer.__dict__
    if "state_dict" in own or "load_state_dict" in own:
        return False
    return not any(own.get(hooks) for hooks in _HOOKS)


_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True, slots=True)
class Numbering:
    """The parameters of an optimizer in the order of their groups, by their ids: their numbers in ``state_dict``, and
    their names if the state has their module."""

    numbers: dict[int, int]
    names: tuple[str | None, ...]
    groups: tuple[tuple[int, ...], ...]
    found_in: tuple[list[int], list[int], dict[int, str]]
    """The parameters' ids, the groups' lengths, and the names of the state's parameters by id: they determine
    everything else."""

    @property
    def ids(self) -> list[int]:
        return self.found_in[0]

    def state_name(self, number: int) -> str:
        """The name of a parameter's state, relative to ``<optimizer>.state``."""
        return self.names[number] or f"%i{number}"


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer in the order of their groups."""
    return [*chain.from_iterable([group["params"] for group in optimizer.param_groups])]


def number_parameters(
    optimizer: Optimizer, scans: Scans, before: Numbering | None = None
) -> Numbering:
    """Number the parameters of an optimizer; ``before`` is an earlier result, which is reused if it is still right."""
    ids = [*map(id, parameters_of(optimizer))]
    found_in = ids, [len(group["params"]) for group in optimizer.param_groups], scans.parameters
    if before is not None and before.found_in == found_in:
        return before
    numbers = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))  # first wins
    groups = [map(numbers.__getitem__, map(id, g["params"])) for g in optimizer.param_groups]
    names = tuple(map(scans.parameters.get, ids))
    return Numbering(numbers, names, tuple(map(tuple, groups)), found_in)
