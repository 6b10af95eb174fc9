"""Dicts that stand in a state in place of the object whose ``state_dict()`` returned them.

What is restored into such a dict reaches its object only where a tensor of it is the object's own memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from tierfall.core.tensors import tensors, value_codec
from tierfall.core.tensors.dtensor import local_tensor

OPTIMIZER = "an optimizer"
_KEYS = {
    OPTIMIZER: {"state", "param_groups"},
    "a learning rate scheduler": {"last_epoch", "_step_count"},
    "a gradient scaler": {"scale", "growth_factor", "growth_interval"},
}


def state_dict_of(value: object) -> str | None:
    """Say what a dict is the state_dict() of, none of whose entries reaches its object when it is restored; None for
    any other value. A module's is not among them: see ``lost_entries``."""
    if type(value) not in value_codec.MAPPINGS:
        return None
    keys = set(value)  # type: ignore[call-overload]
    kind = next((kind for kind, those in _KEYS.items() if those <= keys), None)
    if kind == OPTIMIZER and not _numbers_parameters(value):
        return None
    return kind


def _numbers_parameters(value: Any) -> bool:
    """Say whether an optimizer's dict is its own, which numbers the parameters. The functions of
    torch.distributed.checkpoint name them, and such a dict is restored, to be set by these functions."""
    groups = value["param_groups"]
    return isinstance(groups, list | tuple) and any(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and any(type(number) is int for number in group["params"])
        for group in groups
    )


def lost_entries(live: Any) -> list[Any]:
    """Return the keys of a module's state_dict() whose values are not the module's own memory: copies that hooks made,
    quantized tensors and extra state. Empty for any other value, and for a copy of all of it, such as an average."""
    if type(live) not in value_codec.MAPPINGS or not hasattr(live, "_metadata"):
        return []
    storages = {key: storage for key in live if (storage := _storage(live[key])) is not None}
    uses = Counter(storage.data_ptr() for storage in storages.values())
    own = {
        key
        for key, storage in storages.items()
        if tensors.storage_uses(storage) > uses[storage.data_ptr()] or _is_held(live, key)
    }
    if not own:
        return []
    return [key for key, value in live.items() if key not in own and not _is_nothing(value)]


def _storage(value: object) -> torch.UntypedStorage | None:
    """Return the memory of a tensor that could be filled in place; None where it has none."""
    if not isinstance(value, torch.Tensor):
        return None
    local = local_tensor(value)
    if local.layout is not torch.strided or local.is_quantized or _is_nothing(local):
        return None
    return local.untyped_storage()


def _is_held(live: Mapping[Any, Any], key: Any) -> bool:
    """Say whether others hold the very object, as a module does where it was asked with ``keep_vars``."""
    return sys.getrefcount(live[key]) > _HELD_BY_DICT


_HELD_BY_DICT = 2
"""References to an object that one dict holds: that one, and the one of the question."""


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())
