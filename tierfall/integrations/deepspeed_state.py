"""The state of a DeepSpeed engine: which can be saved, the files of a rank, and values of DeepSpeed's classes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from deepspeed.pipe import PipelineModule  # type: ignore[import-not-found]
from deepspeed.runtime.fp16 import loss_scaler  # type: ignore[import-not-found]
from torch import distributed as dist

from tierfall import item, register_codec
from tierfall.errors import ConfigError, RestoreError

ENTRY = "deepspeed"


def lazily(weights: dict[str, Any], engine: Any) -> dict[str, Any]:
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


def state_of(files: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a rank for ``ckpt.save``: the content of its files, by name."""
    return {ENTRY: {"world_size": dist.get_world_size(), "files": files}}


def files_of(state: dict[str, Any], step: int) -> Any:
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


def check_engine(engine: Any) -> None:
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
