"""Calls of Lightning that look for files: from the import of the package on, they accept pointers, and ``last``.

Lightning resolves ``ckpt_path="last"`` before it calls any callback, and opens the path of ``load_from_checkpoint``
itself: it asks a plugin about neither.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.core import saving

import tierfall
from tierfall.integrations import frameworks
from tierfall.integrations.lightning import files
from tierfall.integrations.lightning.state import ENTRY, SHARDED

NEWEST = "last checkpoint of the run"
"""A path at which nothing is, and whose name begins with ``last``."""


def accept_pointers(plugin: type) -> None:
    """Let ``validate``, ``test`` and ``predict`` of a Trainer with a ``plugin`` evaluate the newest checkpoint for
    ``ckpt_path="last"``, and ``load_from_checkpoint`` of modules load what a pointer leads to."""
    for name in ("validate", "test", "predict"):
        setattr(Trainer, name, _with_newest(getattr(Trainer, name), plugin))
    if (load := getattr(saving, "pl_load", None)) is not None:
        saving.pl_load = _with_pointers(load)


def load(path: Any, config: Any = None, run: str | None = None, **options: Any) -> dict[str, Any]:
    """Load Lightning's dict of a checkpoint that is evaluated: what the pointer at ``path`` names. If the name of the
    path begins with ``last``, the newest of the pointer's run, or of the configuration's without a pointer."""
    if files.is_last(path) and files.is_pointer(path):
        path = tierfall.read_pointer(path).config()
    elif files.is_last(path) and config is not None:
        path = frameworks.config_of(config, run)
    loaded = tierfall.load(path, **options)
    return {**loaded[ENTRY], **loaded.get(SHARDED, {})}


def _with_newest(call: Callable[..., Any], plugin: type) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def evaluate(trainer: Any, *args: Any, **more: Any) -> Any:
        given = signature.bind(trainer, *args, **more)
        named = given.arguments.get("ckpt_path")
        if named == "last" and isinstance(trainer.strategy.checkpoint_io, plugin):
            given.arguments["ckpt_path"] = NEWEST
        return call(*given.args, **given.kwargs)

    return evaluate


def _with_pointers(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def load_path(path: Any, map_location: Any = None, **more: Any) -> Any:
        if not isinstance(path, str | os.PathLike) or not files.is_pointer(path):
            return call(path, map_location, **more)
        known = isinstance(map_location, str | torch.device)  # else a function of Lightning's
        return load(path, map_location=map_location if known else "cpu")

    return load_path
