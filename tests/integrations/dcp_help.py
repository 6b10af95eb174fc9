"""What tests of DCP on tierfall share: a small model with its state as DCP gets it, and the same with nothing in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.core.capture.lazy_help import Trainer

QUIET = "ignore:torch.distributed is (disabled|unavailable):UserWarning"


def nested(trainer: Trainer, **extra: Any) -> dict[str, Any]:
    """The state of a model and its optimizer as DCP's own functions give it, and Python values."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer)
    return {"model": model, "optim": optimizer, "extra": {"epoch": 3, **extra}}


def emptied(state: Any) -> Any:
    """The same structure with zeros for tensors, and None for values."""
    if isinstance(state, dict):
        return {key: emptied(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(v, dict | torch.Tensor) for v in state):
        return [emptied(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and torch.equal(one, other)
    return bool(one == other)


class Renaming(DefaultSavePlanner):
    """Plans under other names than the state's."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        renamed = {f"x{key}": value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)
