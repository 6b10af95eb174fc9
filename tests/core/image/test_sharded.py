"""Sharded tensors: what an image holds of them, and into what they are restored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_help import load, make_image, restore
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    zeros,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from tierfall.core.image.header import read_header
from tierfall.core.image.layout import plan_layout
from tierfall.core.state.walk import walk_state
from tierfall.core.state.walk_cache import WalkCache
from tierfall.core.tensors import dtensor
from tierfall.core.types.errors import CaptureError, IntegrityError, RestoreError
from tierfall.core.types.values import Changes


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def make_module(mesh: DeviceMesh, fill: float) -> nn.Module:
    module = nn.Module()
    weight = distribute_tensor(torch.full((6, 4), fill), mesh, [Shard(0)])
    module.weight = nn.Parameter(weight)
    module.bias = nn.Parameter(distribute_tensor(torch.full((4,), fill), mesh, [Replicate()]))
    module.register_buffer("count", torch.tensor(fill))
    return module


def test_a_module_and_its_optimizer_come_back_into_fresh_ones(mesh: DeviceMesh) -> None:
    module = make_module(mesh, 1.0)
    optimizer = torch.optim.AdamW(module.parameters())
    (module.weight.sum() + module.bias.sum()).backward()
    optimizer.step()
    image, _ = make_image({"m": module, "o": optimizer, "rng": None})
    other = make_module(mesh, 0.0)
    fresh = torch.optim.AdamW(other.parameters())
    restore({"m": other, "o": fresh, "rng": None}, image)
    assert torch.equal(other.weight.to_local(), module.weight.to_local())
    for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == fresh.state[theirs].keys()
        for key, value in optimizer.state[mine].items():
            made = fresh.state[theirs][key]
            assert type(made) is type(value), key
            if isinstance(value, DTensor):
                assert made.placements == value.placements
                assert torch.equal(made.to_local(), value.to_local())
    other.weight.sum().backward()
    fresh.step()


def test_a_parameter_of_several_ranks_changes_on_a_step_only(mesh: DeviceMesh) -> None:
    view = walk_state({"m": make_module(mesh, 1.0)})
    changes = {tensor.name: tensor.changes for tensor in view.tensors}
    assert changes["m.weight"] is Changes.ON_STEP
    assert changes["m.count"] is Changes.ANYTIME


def test_a_later_walk_recalls_it(mesh: DeviceMesh) -> None:
    module, recall = make_module(mesh, 1.0), WalkCache()
    first = walk_state({"m": module}, recall)
    again = walk_state({"m": module}, recall)
    assert again.structure == first.structure
    assert recall.find("m") is not None
    assert plan_layout(first).matches(again)


def test_the_header_and_the_manifest_say_where_a_block_lies(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_block(monkeypatch, whole=(12, 4), offset=(6, 0))
    tensor = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    image, layout = make_image({"w": tensor, "rng": None})
    header = read_header(image, image_bytes=len(image), what="image")
    assert header.tensors[0].piece == dtensor.TensorPiece((12, 4), (6, 0), (6, 4))
    (piece,) = json.loads(bytes(layout.pieces))
    assert (piece["shape"], piece["offset"], piece["lengths"]) == ([12, 4], [6, 0], [6, 4])
    assert load(image)["w"].shape == (6, 4)


def test_another_block_is_refused(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    image, _ = make_image({"w": tensor, "rng": None})
    for live in (torch.zeros(6, 4), distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)])):
        with pytest.raises(RestoreError, match="w: the checkpoint has"):
            restore({"w": live, "rng": None}, image)
    plain, _ = make_image({"w": torch.ones(6, 4), "rng": None})
    with pytest.raises(RestoreError, match="w: the checkpoint has"):
        restore({"w": tensor, "rng": None}, plain)
    pretend_block(monkeypatch, whole=(12, 4), offset=(6, 0))
    with pytest.raises(RestoreError, match=r"this rank has \(6, 4\) at \(6, 0\)"):
        restore({"w": tensor, "rng": None}, image)
    assert tensor.to_local().sum() == 24, "nothing was written"


def test_a_block_of_another_shape_at_the_same_place_is_refused(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_block(monkeypatch, whole=(8, 4), offset=(0, 0))
    image, _ = make_image({"w": distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)]), "rng": None})
    live = distribute_tensor(torch.zeros(8, 1), mesh, [Shard(0)])  # as many bytes
    monkeypatch.setattr(type(live), "shape", torch.Size((8, 4)))
    with pytest.raises(RestoreError, match="w: the checkpoint has"):
        restore({"w": live, "rng": None}, image)


def test_partial_sums_are_refused_by_name(mesh: DeviceMesh) -> None:
    tensor = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(CaptureError, match=r'state\["w"\].*Partial'):
        walk_state({"w": tensor})


def test_a_tensor_that_other_ranks_hold_is_refused_by_name_saving_and_restoring() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        elsewhere = zeros(4, 2, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
        with pytest.raises(CaptureError, match=r'state\["w"\].*not in its mesh'):
            walk_state({"w": elsewhere})
        image, _ = make_image({"w": torch.ones(4, 2), "rng": None})
        with pytest.raises(RestoreError, match=r"w: cannot be restored into.*not in its mesh"):
            restore({"w": elsewhere, "rng": None}, image)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 3])
def test_parts_of_every_size_come_back(rank: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        for rows in (3, 5, 0):  # none on rank 3
            for dimension in (0, 1):
                whole = torch.arange(2.0 * rows).reshape((rows, 2) if dimension == 0 else (2, rows))
                there = [Shard(dimension)]
                one = distribute_tensor(whole, mesh, there, src_data_rank=None)
                other = distribute_tensor(whole - 7, mesh, there, src_data_rank=None)
                image, _ = make_image({"w": one, "rng": None})
                restore({"w": other, "rng": None}, image)
                assert torch.equal(other.to_local(), one.to_local())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "entry", [[0], [9, [6, 4], [0, 0]], [0, [6], [0]], [0, [6, 4], [1, 0]], [0, "x", [0, 0]]]
)
def test_a_block_outside_of_its_whole_is_damage(
    mesh: DeviceMesh, entry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)])
    monkeypatch.setattr("tierfall.core.image.layout._sharded", lambda view, slots: [entry])
    image, _ = make_image({"w": tensor, "rng": None})
    with pytest.raises(IntegrityError, match="header is damaged"):
        read_header(image, image_bytes=len(image), what="image")


def pretend_block(
    monkeypatch: pytest.MonkeyPatch, *, whole: tuple[int, ...], offset: tuple[int, ...]
) -> None:
    """Let what this one rank holds be a block of something larger, as with several ranks."""
    dtensor._pieces.clear()
    real = dtensor._block
    monkeypatch.setattr(
        dtensor, "_block", lambda tensor: dtensor.TensorPiece(whole, offset, real(tensor).lengths)
    )
