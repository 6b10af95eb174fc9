"""What other programs save, made by their own libraries: a model, its optimizer and scheduler, in each format."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict


class Trained:
    """A model after one step, with its optimizer and its scheduler; ``fresh()`` has the same shapes, and no step."""

    def __init__(self, *, seed: int = 0, steps: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.125)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        for _ in range(steps):
            self.model(torch.randn(5, 8)).sum().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    @property
    def parts(self) -> dict[str, Any]:
        """Its objects, by the usual names."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def fresh() -> Trained:
    return Trained(seed=1, steps=0)


def save_torch(path: Path, trained: Trained, **more: Any) -> Path:
    state = {name: part.state_dict() for name, part in trained.parts.items()}
    torch.save({**state, "epoch": 3, **more}, path)
    return path


def save_sharded(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 2) -> Path:
    """Write shards of safetensors with an index, as Hugging Face does."""
    import json

    folder.mkdir()
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(tensors)[number::shards]
        safetensors.torch.save_file(
            {name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"}
        )
        weight_map |= dict.fromkeys(names, file)
    document = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(document))
    return folder


def save_dcp(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def dcp_state(trained: Trained) -> dict[str, Any]:
    model, optimizer = get_state_dict(trained.model, trained.optimizer)
    return {"model": model, "optimizer": optimizer, "epoch": 3}
