"""Reading what ``torch.save`` and Lightning wrote, with ``weights_only``: no class of the file is built."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from tierfall.core.types.errors import ConfigError, IntegrityError

_REFUSED = re.compile(r"(?:GLOBAL|[Cc]lass|function) ([\w.]+)")
_LIGHTNING = "pytorch-lightning_version"
_ADVICE = (
    "Load it with weights_only=False where you trust it, and save it again as tensors and plain values, or save it by "
    "Checkpointer.save"
)


def read_torch(path: Path) -> Mapping[Any, Any]:
    """Return the mapping that a file holds, its tensors mapped where the file allows it.

    Raises ConfigError where it needs a class, or holds no mapping; IntegrityError where it is damaged.
    """
    is_zip = zipfile.is_zipfile(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise _refusal(path, error, is_zip=is_zip) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise _damage(path, error) from error
    if isinstance(found, torch.Tensor) or not isinstance(found, Mapping):
        raise ConfigError(
            f"import: {path} holds a {type(found).__name__}; expected a state_dict, or a dict of them"
        )
    return _of_lightning(found) if _LIGHTNING in found else found


def _refusal(path: Path, error: Exception, *, is_zip: bool) -> ConfigError | IntegrityError:
    """Return the error for a file that ``weights_only`` does not load; it names the classes, if that is why."""
    try:
        classes = sorted(get_unsafe_globals_in_checkpoint(path)) if is_zip else []
    except (RuntimeError, ValueError, pickle.UnpicklingError, EOFError):
        classes = []
    which = ", ".join(classes[:4]) or refused_name(error)
    if not which:
        return _damage(path, error)
    return ConfigError(
        f"import: {path} holds more than tensors and plain values, and nothing of it was run: {which}. {_ADVICE}"
    )


def refused_name(error: Exception) -> str:
    """Return the name of the class or function that ``weights_only`` has refused; '' if it failed otherwise."""
    found = _REFUSED.search(str(error))
    return found[1] if found else ""


def _damage(path: Path, error: Exception) -> IntegrityError:
    why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return IntegrityError(f"import: {path} is damaged, or truncated: {why}")


def _of_lightning(found: Mapping[Any, Any]) -> dict[str, Any]:
    """Return Lightning's entries: the model, its optimizers and schedulers by the usual names, the rest below
    ``lightning``."""
    rest = dict(found)
    state: dict[str, Any] = {"model": rest.pop("state_dict", {})}
    for key, one, many in (
        ("optimizer_states", "optimizer", "optimizers"),
        ("lr_schedulers", "scheduler", "schedulers"),
    ):
        states = rest.pop(key, None) or []
        if len(states) == 1:
            state[one] = states[0]
        elif states:
            state[many] = list(states)
    return {**state, "lightning": rest}
