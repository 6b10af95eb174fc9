"""DeepSpeed: ``save_checkpoint`` and ``load_checkpoint`` of an engine, with a run of tierfall in place of files.

DeepSpeed passes the content of each file to a checkpoint engine, and looks for files when it loads. So both methods run
in a temporary folder, in which a load finds empty files of the names that were saved. Nothing is pickled.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]
from deepspeed.runtime.checkpoint_engine import checkpoint_engine  # type: ignore[import-not-found]
from deepspeed.runtime.fp16 import loss_scaler  # type: ignore[import-not-found]
from torch import distributed as dist

from tierfall import Checkpointer, SaveHandle, item, register_codec
from tierfall.errors import ConfigError, RestoreError
from tierfall.integrations import frameworks

ENTRY = "deepspeed"
_TAG = "global_step"


class TierfallEngine(checkpoint_engine.CheckpointEngine):  # type: ignore[misc]
    """Saves and loads the state of an engine that DeepSpeed has initialized.

    From ``TierfallEngine(engine, ckpt)`` on, ``engine.save_checkpoint`` and ``engine.load_checkpoint`` use ``ckpt``, on
    all ranks, and no folder. A save returns as ``Checkpointer.save`` does; ``handle`` is the SaveHandle of the last. A
    load takes the newest step, or that of ``tag``, and sets the random state last. It returns (None, None) if nothing
    was saved. With ``checkpoint.load_universal`` DeepSpeed loads from its folder. ConfigError for an engine whose ranks
    need files of other ranks; RestoreError for an unknown tag, and for another number of ranks than saved.
    """

    def __init__(self, engine: Any, ckpt: Checkpointer) -> None:
        super().__init__()
        frameworks.check_version("deepspeed")
        _check_engine(engine)
        self.handle: SaveHandle | None = None
        self._engine, self._ckpt = engine, ckpt
        self._files: dict[str, Any] = {}
        self._own_save, self._own_load = engine.save_checkpoint, engine.load_checkpoint
        engine.save_checkpoint, engine.load_checkpoint = self._save_all, self._load_all

    def export(self, save_dir: str | os.PathLike[str], **options: Any) -> None:
        """Write DeepSpeed's own files of the engine, as its ``save_checkpoint`` does. All ranks make this call."""
        self._own_save(os.fspath(save_dir), **options)

    @contextmanager
    def _in_place(self) -> Iterator[str]:
        """Take the place of DeepSpeed's files for one call; yield the folder for it. Each rank passes its weights."""
        engine = self._engine
        own = engine.checkpoint_engine, engine.save_non_zero_checkpoint
        engine.checkpoint_engine, engine.save_non_zero_checkpoint = self, True
        try:
            with tempfile.TemporaryDirectory() as folder:
                yield folder
        finally:
            engine.checkpoint_engine, engine.save_non_zero_checkpoint = own
            self._files = {}

    def _save_all(
        self, save_dir: Any = None, tag: Any = None, client_state: Any = None, **options: Any
    ) -> bool:
        frameworks.meet_all_ranks(self._ckpt, "save_checkpoint")
        with self._in_place() as folder:
            self._own_save(folder, tag=tag, client_state=client_state or {}, **options)
            tags = () if tag is None else (str(tag),)
            state = _state_of(self._files)
            self.handle = self._ckpt.save(self._engine.global_steps, state, tags=tags)
        return True

    def _load_all(self, load_dir: Any = None, tag: Any = None, **options: Any) -> Any:
        if self._engine.load_universal_checkpoint():
            return self._own_load(load_dir, tag, **options)
        loaded = self._ckpt.load(None if tag is None else self._step_of(str(tag)))
        if loaded is None:  # a new run begins with a folder of DeepSpeed's own, if there is one
            return self._own_load(load_dir, tag, **options) if load_dir else (None, None)
        report, state = loaded
        with self._in_place() as folder:
            os.mkdir(os.path.join(folder, _TAG))
            self._files = _files_of(state, report.step)
            for name in self._files:
                open(os.path.join(folder, _TAG, name), "x").close()
            result = self._own_load(folder, _TAG, **options)
        frameworks.restore_random(self._ckpt, report)
        return result

    def _step_of(self, tag: str) -> int:
        for checkpoint in self._ckpt.checkpoints():
            if tag in (f"{_TAG}{checkpoint.step}", *checkpoint.tags):
                return checkpoint.step
        raise RestoreError(
            f"load_checkpoint: no checkpoint has the tag {tag!r}; expected one that save_checkpoint got, or {_TAG}N "
            "for step N. Without a tag the newest step is loaded"
        )

    # What DeepSpeed calls --------------------------------------------------------------------------

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Keep the content of a file until all are there."""
        content = dict(state_dict)
        if isinstance(weights := content.get("module"), dict):
            content["module"] = _lazily(weights, self._engine)
        self._files[os.path.basename(path)] = content

    def load(self, path: str, map_location: object = None) -> Any:
        """Return the content of a file, its tensors on the CPU."""
        return self._files[os.path.basename(path)]

    def create(self, info: object) -> bool:
        """Do nothing: ``save_checkpoint`` saves all files as one state."""
        return True

    commit = create

    def preserves_storage_sharing(self) -> bool:
        """Return False: DeepSpeed need not clone tensors."""
        return False


def _lazily(weights: dict[str, Any], engine: Any) -> dict[str, Any]:
    """Return the weights of ``engine`` with the trained ones to be captured lazily.

    DeepSpeed writes them inside its step, after that of the torch optimizer, which waits for the capture.
    """
    parameters = engine.module.parameters()
    trained = {p.data_ptr() for p in parameters if p.requires_grad and p.numel()}
    return {
        name: item(value, changes="on_step")
        if isinstance(value, torch.Tensor) and value.data_ptr() in trained
        else value
        for name, value in weights.items()
    }


def _state_of(files: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a rank for ``ckpt.save``: the content of its files, by name."""
    return {ENTRY: {"world_size": dist.get_world_size(), "files": files}}


def _files_of(state: dict[str, Any], step: int) -> Any:
    """Return the content of this rank's files by name, of a loaded state. Raises RestoreError where they do not fit."""
    if (saved := state.get(ENTRY)) is None:
        raise RestoreError(f"load_checkpoint: step {step} was not saved by a DeepSpeed engine")
    if saved["world_size"] != (ranks := dist.get_world_size()):
        raise RestoreError(
            f"load_checkpoint: step {step} was saved by {saved['world_size']} ranks, each with its part of ZeRO's "
            f"state, and this run has {ranks}: load it with as many ranks, call export(folder), convert the folder by "
            "DeepSpeed's ds_to_universal.py, and load that with checkpoint.load_universal"
        )
    return saved["files"]


def _check_engine(engine: Any) -> None:
    """Raise ConfigError for an engine whose ranks need files of other ranks."""
    refused = {
        "pipeline parallelism": isinstance(engine.module, PipelineModule),
        "tensor parallelism": engine.mp_world_size > 1,
        "mixture of experts": engine.has_moe_layers,
        "an optimizer on NVMe": engine.zero_nvme_offload_optimizer(),
        "elastic_checkpoint": engine.zero_elastic_checkpoint(),
    }
    if found := ", ".join(what for what, is_used in refused.items() if is_used):
        raise ConfigError(f"TierfallEngine: {found}: not supported; let DeepSpeed save this engine")


def _scaler(kind: Any, values: dict[str, Any]) -> object:
    scaler = kind.__new__(kind)  # its parameters are not all attributes
    vars(scaler).update(values)
    return scaler


for _kind in (loss_scaler.LossScaler, loss_scaler.DynamicLossScaler):
    register_codec(
        _kind, f"deepspeed.{_kind.__name__}", lambda s: {**vars(s)}, partial(_scaler, _kind)
    )
