"""Reading what ``torch.save`` and Lightning wrote, with ``weights_only``: no class of the file is built."""

from __future__ import annotations

import errno
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from tierfall.core.types.errors import ConfigError, IntegrityError
from tierfall.imports.sources import DEEPSPEED, unreadable

_REFUSED = re.compile(r"(?:GLOBAL|[Cc]lass|function) ([\w.]+)")
_LIGHTNING = "pytorch-lightning_version"
_DEEPSPEED = "ds_version"
_ADVICE = (
    "Load it with weights_only=False where you trust it, and save it again as tensors and plain values, or save it by "
    "Checkpointer.save"
)


def read_torch(path: Path) -> Mapping[Any, Any]:
    """Return the mapping that a file holds, its tensors mapped where the file allows it.

    Raises ConfigError where it needs a class, or holds no mapping; IntegrityError where it is damaged.
    """
    members = zip_members(path)
    if members and "data.pkl" not in members:
        raise ConfigError(f"import: {path} is a zip file that torch.save did not write")
    if "constants.pkl" in members:
        raise ConfigError(
            f"import: {path} is a TorchScript module: load it by torch.jit.load, and torch.save its state_dict()"
        )
    found = load_plain(path, f"import: {path}", mmap=bool(members))
    if isinstance(found, torch.Tensor) or not isinstance(found, Mapping):
        raise ConfigError(
            f"import: {path} holds a {type(found).__name__}; expected a state_dict, or a dict of them"
        )
    if _DEEPSPEED in found:
        raise ConfigError(f"import: {path} {DEEPSPEED}")
    return _of_lightning(found) if _LIGHTNING in found else found


def zip_members(path: Path) -> dict[str, zipfile.ZipInfo]:
    """Return the members of the zip file that torch.save writes, by their names below its folder; none for a file of
    another format. Raises IntegrityError where it is damaged."""
    try:
        if not zipfile.is_zipfile(path):
            return {}
        with zipfile.ZipFile(path) as archive:
            return {info.filename.partition("/")[2]: info for info in archive.infolist()}
    except Exception as error:  # whatever its bytes lead to
        raise _refusal(path, f"import: {path}", error) from error


def load_plain(source: Path | IO[bytes], what: str, *, mmap: bool = False) -> Any:
    """Return what torch.save wrote, by ``weights_only``; ``what`` names it in errors. Raises as ``read_torch`` does."""
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever its bytes lead to
        raise _refusal(source, what, error) from error


def _refusal(source: Path | IO[bytes], what: str, error: Exception) -> ConfigError | IntegrityError:
    """Return the error for bytes that ``weights_only`` does not load; it names the classes, if that is why."""
    if isinstance(error, OSError) and isinstance(source, Path) and error.errno != errno.EINVAL:
        return unreadable(source, error)  # EINVAL: a seek to where damaged bytes lead
    classes: list[str] = []
    if isinstance(error, pickle.UnpicklingError):
        refused = _REFUSED.search(str(error))
        try:
            classes = sorted(get_unsafe_globals_in_checkpoint(source))
        except (EOFError, LookupError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError):
            classes = []  # a legacy file, or a damaged one
        classes = classes or ([refused[1]] if refused else [])
    if classes:
        return ConfigError(
            f"{what} holds more than tensors and plain values, and nothing of it was run: {', '.join(classes[:4])}. "
            f"{_ADVICE}"
        )
    why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return IntegrityError(f"{what} is damaged, or truncated: {why}")


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
