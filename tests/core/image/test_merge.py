"""Merging the headers of several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from image_help import header_of, make_image
from torch import nn

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.merge import MergedHeader, merge_headers
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.types.errors import RestoreError


def merged(*states: Any, own: int | None = None) -> MergedHeader:
    headers = {rank: header_of(make_image(state)[0]) for rank, state in enumerate(states)}
    return merge_headers(headers, what="1@1 of several ranks", own=own)


def cut(state: Any, name: str, whole: tuple[int, ...], offset: tuple[int, ...]) -> ImageHeader:
    """The header of a state in which one tensor is a block of a larger one."""
    header = header_of(make_image(state)[0])
    return replace(
        header,
        tensors=tuple(
            replace(t, piece=TensorPiece(whole, offset, t.shape)) if t.name == name else t
            for t in header.tensors
        ),
    )


def test_stages_of_a_pipeline_add_up() -> None:
    torch.manual_seed(1)
    first, second = nn.Linear(2, 3), nn.Linear(3, 4)
    states = []
    for key, module in (("0", first), ("1", second)):
        stage = nn.ModuleDict({key: module})
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.step()
        states.append({"model": stage, "optimizer": optimizer, "rng": None})
    found = merged(*states)
    both = nn.ModuleDict({"0": nn.Linear(2, 3), "1": nn.Linear(3, 4)})
    optimizer = torch.optim.SGD(both.parameters(), lr=0.5, momentum=0.9)
    plan = plan_fill({"model": both, "optimizer": optimizer, "rng": None}, found.header)
    ranks = {
        found.header.tensors[want.position].name: found.blocks[want.position][0].rank
        for want in plan.targets
    }
    assert ranks["model.0.weight"] == 0
    assert ranks["model.1.weight"] == 1
    assert ranks["optimizer.state.model.0.weight.momentum_buffer"] == 0
    assert ranks["optimizer.state.model.1.weight.momentum_buffer"] == 1


def test_a_block_that_is_nowhere_is_reported() -> None:
    headers = {0: cut({"w": torch.zeros(2, 3), "rng": None}, "w", (3, 3), (0, 0))}
    found = merge_headers(headers, what="test", own=None)
    with pytest.raises(RestoreError, match="w: is incomplete"):
        plan_fill({"w": torch.zeros(3, 3), "rng": None}, found.header)


def test_the_tensors_of_one_rank_count_whatever_shape_others_have() -> None:
    states = [
        {"t": torch.zeros(2 + rank), "loader": {"n": np.arange(1 + rank)}, "rng": None}
        for rank in range(2)
    ]
    for rank in range(2):
        found = merged(*states, own=rank)
        plan = plan_fill(states[rank], found.header)
        blocks = [found.blocks[want.position] for want in plan.targets]
        assert [[block.rank for block in those] for those in blocks] == [[rank], [rank]]


def test_what_is_not_of_one_kind_is_reported() -> None:
    found = merged({"x": torch.zeros(2), "rng": None}, {"x": 5, "rng": None})
    with pytest.raises(RestoreError, match=r"x: is not of one kind: .* on rank 0, .* on rank 1"):
        plan_fill({"x": 1, "rng": None}, found.header)


def test_what_is_in_conflict_does_not_keep_the_rest_from_being_restored() -> None:
    """Two ranks alike and a third that differs: no replicas are compared of what is no one tensor."""
    states = [{"x": torch.zeros(n), "other": torch.ones(4), "rng": None} for n in (2, 2, 3)]
    found = merged(*states)
    names = {position: found.header.tensors[position].name for position in found.replicas}
    assert set(names.values()) == {"other"}
    live = {"x": torch.zeros(2), "other": torch.zeros(4), "rng": None}
    assert plan_fill(live, found.header, Choices(only=["other"])).targets
    with pytest.raises(RestoreError, match=r"x: is torch.float32"):
        plan_fill(live, found.header)
