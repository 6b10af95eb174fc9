"""Torch optimizers: which of them are stock, and how their parameters are numbered and named.

A stock optimizer is saved and restored tensor by tensor, since ``load_state_dict`` casts state to the parameter's
dtype. One whose class, object or hooks change what ``state_dict`` or ``load_state_dict`` do is asked through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from tierfall.core.image.modules import Scans


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
    """The parameters of an optimizer in the order of their groups: number, and name where the state has their module.

    A parameter's number is the one that ``state_dict`` gives it.
    """

    parameters: tuple[torch.Tensor, ...]
    numbers: dict[int, int]
    names: tuple[str | None, ...]
    groups: tuple[tuple[int, ...], ...]

    def part(self, number: int) -> str:
        """Name a parameter's state, below ``<optimizer>.state``."""
        return self.names[number] or f"%i{number}"


def numbering(optimizer: Optimizer, scans: Scans) -> Numbering:
    parameters = tuple(chain.from_iterable([group["params"] for group in optimizer.param_groups]))
    ids = [*map(id, parameters)]
    numbers = dict(zip(reversed(ids), range(len(ids) - 1, -1, -1), strict=True))  # the first counts
    named = map(scans.parameters.get, ids, repeat((None,)))
    groups = [map(numbers.__getitem__, map(id, g["params"])) for g in optimizer.param_groups]
    return Numbering(
        parameters,
        numbers,
        names=tuple(map(itemgetter(0), named)),
        groups=tuple(map(tuple, groups)),
    )


def group_values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
