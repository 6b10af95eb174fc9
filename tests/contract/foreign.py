"""What other programs save, made by their own libraries."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp


def hub(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """Shards of safetensors with an index, as Hugging Face writes them."""
    folder.mkdir()
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name].contiguous() for name in sorted(tensors)[number::shards]}
        safetensors.torch.save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder
