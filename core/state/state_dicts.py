"""Objects with a ``state_dict()``, and dicts that a state has in place of the object that returned them.

A restore into such a dict reaches the object only through tensors that share the object's memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from tierfall.core.tensors import tensors, value_codec, wrappers
from tierfall.core.tensors.builtin_codecs import DeviceNumber
from tierfall.core.tensors.dtensor import local_tensor

OPTIMIZER = "an optimizer"
_KEYS = {
    OPTIMIZER: {"state", "param_groups"},
    "a learning rate scheduler": {"last_epoch", "_step_count"},
    "a gradient scaler": {"scale", "growth_factor", "growth_interval"},
}


def is_stateful(value: object) -> bool:
    """Whether an object (not a class) has methods state_dict and load_state_dict."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def object_state(value: Any) -> Any:
    """What an object's ``state_dict()`` returns. torch's own of a gradient scaler would make the host wait for all work
    of its device, to read two numbers: each is a ``DeviceNumber`` here."""
    is_scaler = type(value).state_dict is torch.amp.GradScaler.state_dict
    scale = getattr(value, "_scale", None) if is_scaler else None  # a scaler that is off has none
    if scale is None:
        return value.state_dict()
    bare = object.__new__(type(value))
    vars(bare).update(vars(value), _scale=None, _growth_tracker=None)
    numbers = {"scale": scale, "_growth_tracker": value._growth_tracker}
    return {**bare.state_dict(), **{key: DeviceNumber(number) for key, number in numbers.items()}}


def type_name(value: object) -> str:
    """The name of an object's class, with those of the schedulers in it. Without the module, which may change from
    version to version."""
    name = type(value).__name__
    if isinstance(value, ChainedScheduler | SequentialLR):
        return f"{name}({', '.join(map(type_name, value._schedulers))})"
    return name


def state_dict_of(value: object) -> str | None:
    """The kind of object whose state_dict() a dict is, if a restore into it cannot reach that object; None for any
    other value. For a module's state_dict see ``lost_entries``."""
    if type(value) not in value_codec.MAPPINGS:
        return None
    keys = set(value)  # type: ignore[call-overload]
    kind = next((kind for kind, required in _KEYS.items() if required <= keys), None)
    if kind == OPTIMIZER and not _numbers_parameters(value):
        return None
    return kind


def _numbers_parameters(value: Any) -> bool:
    """Whether a dict is from an optimizer's own state_dict(), which numbers parameters. The dicts of
    torch.distributed.checkpoint have names instead; these are restored, since its functions load them."""
    groups = value["param_groups"]
    return isinstance(groups, list | tuple) and any(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and any(type(number) is int for number in group["params"])
        for group in groups
    )


def lost_entries(live: Any) -> list[Any]:
    """The keys of a module's state_dict() whose values do not share the module's memory: copies by hooks, quantized
    tensors, extra state. Empty for any other value, and for a copy of everything, such as an average."""
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
    """The storage of a tensor that can be filled in place, else None."""
    if not isinstance(value, torch.Tensor):
        return None
    local = local_tensor(next(wrappers.inner_tensors(value), value))
    if local.layout is not torch.strided or local.is_quantized or _is_nothing(local):
        return None
    return local.untyped_storage()


def _is_held(live: Mapping[Any, Any], key: Any) -> bool:
    """Whether others reference the tensor object, as a module does with ``keep_vars``."""
    return sys.getrefcount(live[key]) > _HELD_BY_DICT


_HELD_BY_DICT = 2
"""References to an object that only a dict has: the dict's, and the argument of getrefcount."""


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and not value.numel())
