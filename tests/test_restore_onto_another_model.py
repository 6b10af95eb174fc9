"""A restore onto a model that has changed: other names, a new head, an embedding of another size, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tierfall
from tests.rank_kit import config_of, save_on_ranks
from tierfall.core.types.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]


class Net(nn.Module):
    """An embedding of ``words``, a body, and a head of ``classes``."""

    def __init__(self, words: int = 10, classes: int = 3, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, words if tied else classes, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.body(self.embed(numbers)))
        return found


def make(*args: Any, steps: int = 0, seed: int = 0, **words: Any) -> dict[str, Any]:
    """A model and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model = Net(*args, **words)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        train({"model": model, "optimizer": optimizer})
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.arange(5)).pow(2).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """Step 1 of a net of 10 words and 3 classes after two steps."""
    config: dict[str, Any] = make_config(disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, make(steps=2), block=True)
    return config


def restore(config: Any, state: dict[str, Any], **words: Any) -> None:
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(state, **words) is not None


# An embedding of another size ------------------------------------------------------------------------


def test_ranks_that_saved_are_merged_first(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    save_on_ranks(config, 2, [1], lambda rank, step: make(steps=2))
    saved, live = make(steps=2), make(14, seed=1)
    restore(config, live, resize=["model.embed"])
    assert torch.equal(live["model"].embed.weight[:10], saved["model"].embed.weight)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh: DeviceMesh, words: int, steps: int) -> dict[str, Any]:
    model = nn.Module()
    torch.manual_seed(words)
    model.embed = nn.Parameter(distribute_tensor(torch.randn(words, 4), mesh, [Shard(0)]))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model.embed.sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_sharded_parameter_and_its_state(make_config: MakeConfig, mesh: DeviceMesh) -> None:
    config = make_config(disk={})
    saved, live = sharded(mesh, 6, 1), sharded(mesh, 9, 0)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, saved, block=True)
    restore(config, live, resize=["model.embed"])
    weight = live["model"].embed
    assert torch.equal(weight.to_local()[:6], saved["model"].embed.to_local())
    average = live["optimizer"].state[weight]["exp_avg"]
    expected = saved["optimizer"].state[saved["model"].embed]["exp_avg"].to_local()
    assert average.placements == weight.placements
    assert torch.equal(average.to_local()[:6], expected)
    assert not average.to_local()[6:].any()


def test_an_older_step_leaves_nothing_that_a_newer_one_wrote(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Step 2 has the shape of the state, is filled in place, and found damaged at its end. Step 1 would not fill all of
    the embedding."""
    config = make_config(disk={}, host={"capacity": "32MiB"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, make(20_000), block=True)
        ckpt.save(2, make(30_000), block=True)
    image = tmp_path / "disk/run/step-00000002-a0001/rank-00000-of-00001.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match=r"model\.embed\.weight"):
            ckpt.restore(make(30_000, seed=5), resize=["model.embed"])
        live = make(30_000, seed=5)
        assert ckpt.restore(live, step=1, resize=["model.embed"]) is not None
    assert torch.equal(live["model"].embed.weight[:20_000], make(20_000)["model"].embed.weight)
