"""What tests of DCP on tierfall share: a small model with its state as DCP gets it, and the same with nothing in it."""

from __future__ import annotations

import pickle
from pathlib import Path
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


def copied(state: Any) -> Any:
    """The same structure with tensors of its own."""
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [copied(value) for value in state]
    return state.clone() if isinstance(state, torch.Tensor) else state


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


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.crater,)


def bomb(crater: Path) -> bytes:
    return pickle.dumps(Bomb(crater))


class Counter:
    """What DCP calls Stateful: an entry of the state with state_dict and load_state_dict."""

    def __init__(self, count: int, values: torch.Tensor) -> None:
        self.count = count
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.values = state["values"]
