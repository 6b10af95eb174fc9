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
SKIP_HEAD = ["model.head", "optimizer.state.model.head"]


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


@pytest.mark.parametrize("words", [7, 14])
@pytest.mark.parametrize("steps", [0, 1])
def test_what_both_shapes_have_is_restored_and_the_rest_stays(
    config: dict[str, Any], words: int, steps: int
) -> None:
    saved, live = make(steps=2), make(words, 5, steps=steps, seed=1)
    before = live["model"].embed.weight.detach().clone()
    restore(config, live, resize=["model.embed"], skip=SKIP_HEAD)
    both, weight = min(words, 10), live["model"].embed.weight
    assert torch.equal(weight[:both], saved["model"].embed.weight[:both])
    assert torch.equal(weight[both:], before[both:])
    moments = live["optimizer"].state[weight]
    for name in ("exp_avg", "exp_avg_sq"):
        expected = saved["optimizer"].state[saved["model"].embed.weight][name]
        assert moments[name].shape == weight.shape
        assert torch.equal(moments[name][:both], expected[:both])
        assert not moments[name][both:].any()
    assert moments["step"] == 2
    assert torch.equal(live["model"].body.weight, saved["model"].body.weight)
    train(live)


def test_it_is_named_or_it_is_refused(config: dict[str, Any]) -> None:
    live = make(14)
    before = [p.detach().clone() for p in live["model"].parameters()]
    with pytest.raises(RestoreError, match=r"model\.embed\.weight: .*\(10, 6\).*\(14, 6\)"):
        restore(config, live)
    with pytest.raises(RestoreError, match=r"optimizer\.state\.model\.embed\.weight\.exp_avg"):
        restore(config, live, skip=["model.embed"])
    with pytest.raises(RestoreError, match=r"resize='model\.embd' names nothing"):
        restore(config, live, resize=["model.embd"])
    with pytest.raises(RestoreError, match="resize must be a list of names"):
        restore(config, live, resize="model.embed")
    for one, other in zip(before, live["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_the_size_may_differ(make_config: MakeConfig) -> None:
    config = make_config(disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.ones(4, 3), "v": torch.ones(4)}, block=True)
    for live in ({"w": torch.ones(4), "v": torch.ones(4)}, {"w": torch.ones(5, 3).double()}):
        with pytest.raises(RestoreError, match=r"w: the checkpoint has float32 \(4, 3\)"):
            restore(config, live, resize=["w"], only=["w"])
    live = {"w": torch.zeros(2, 5), "v": torch.zeros(0)}
    restore(config, live, resize=["w", "v"])
    assert live["w"].tolist() == [[1, 1, 1, 0, 0]] * 2


def test_equal_shapes_and_a_pattern_change_nothing_else(config: dict[str, Any]) -> None:
    saved, live = make(steps=2), make(seed=1)
    restore(config, live, resize=["model.*"])
    for one, other in zip(saved["model"].parameters(), live["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_tied_weights_are_resized_once(make_config: MakeConfig) -> None:
    config = make_config(disk={})
    saved, live = make(tied=True, steps=2), make(14, tied=True)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, saved, block=True)
    restore(config, live, resize=["model.embed", "model.head"])
    assert live["model"].head.weight is live["model"].embed.weight
    assert torch.equal(live["model"].embed.weight[:10], saved["model"].embed.weight)
    train(live)


def test_a_transposed_view_is_resized(make_config: MakeConfig) -> None:
    config = make_config(disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.arange(6.0).view(2, 3)}, block=True)
    live = {"w": torch.full((4, 3), -1.0).t()}
    restore(config, live, resize=["w"])
    assert live["w"].tolist() == [[0, 1, 2, -1], [3, 4, 5, -1], [-1] * 4]


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


# Names -----------------------------------------------------------------------------------------------


def test_a_model_that_is_part_of_another_one_now(config: dict[str, Any]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    saved, outer = make(steps=2), Outer()
    optimizer = torch.optim.AdamW(outer.parameters())
    live = {"model": outer, "optimizer": optimizer}
    restore(config, live, rename={"model": "model.net"})
    for one, other in zip(saved["model"].parameters(), outer.net.parameters(), strict=True):
        assert torch.equal(one, other)
        theirs = optimizer.state[other]["exp_avg"]
        assert torch.equal(saved["optimizer"].state[one]["exp_avg"], theirs)


def test_a_model_that_was_part_of_another_one(config: dict[str, Any]) -> None:
    body = nn.Linear(6, 6)
    restore(
        config, {"model": body}, only=["model.weight", "model.bias"], rename={"model.body": "model"}
    )
    assert torch.equal(body.weight, make(steps=2)["model"].body.weight)


def test_a_prefix_and_a_resize_go_together(config: dict[str, Any]) -> None:
    outer = nn.ModuleDict({"net": Net(14)})
    restore(
        config,
        {"model": outer},
        only=["model"],
        rename={"model": "model.net"},
        resize=["model.net.embed"],
    )
    assert torch.equal(outer["net"].embed.weight[:10], make(steps=2)["model"].embed.weight)


def test_a_prefix_of_a_plain_entry_is_refused(make_config: MakeConfig) -> None:
    config = make_config(disk={})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"w": torch.ones(2)}, block=True)
    with pytest.raises(RestoreError, match="is not a single key"):
        restore(config, {"w": {"inner": torch.ones(2)}}, rename={"w": "w.inner"})
