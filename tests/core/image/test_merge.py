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
from tierfall.core.image.tree import MapNode
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.load import plan_load
from tierfall.core.state.item import OnResize, item, resize_rules
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


def test_blocks_make_a_whole_tensor() -> None:
    parts = [torch.zeros(2, 3), torch.zeros(1, 3)]
    headers = {
        rank: cut({"w": part, "rng": None}, "w", (3, 3), (2 * rank, 0))
        for rank, part in enumerate(parts)
    }
    found = merge_headers(headers, what="test", own=None)
    assert found.header.tensors[0].shape == (3, 3)
    assert [(b.rank, b.offset, b.lengths) for b in found.blocks[0]] == [
        (0, (0, 0), (2, 3)),
        (1, (2, 0), (1, 3)),
    ]
    assert plan_fill({"w": torch.zeros(3, 3), "rng": None}, found.header).targets


def test_a_block_that_is_nowhere_is_reported() -> None:
    headers = {0: cut({"w": torch.zeros(2, 3), "rng": None}, "w", (3, 3), (0, 0))}
    found = merge_headers(headers, what="test", own=None)
    with pytest.raises(RestoreError, match="w: is incomplete"):
        plan_fill({"w": torch.zeros(3, 3), "rng": None}, found.header)


def test_what_differs_between_ranks_is_reported_when_it_is_asked_for() -> None:
    states = [{"epoch": 7, "rank": rank, "loader": {"at": rank}, "rng": None} for rank in (0, 1)]
    found = merged(*states)
    live = {"epoch": 0, "rank": 0, "loader": {"at": 0}, "rng": None}
    with pytest.raises(
        RestoreError, match=r"rank: differs between the ranks .* 0 on rank 0; 1 on rank 1"
    ):
        plan_fill(live, found.header)
    plan = plan_fill(live, found.header, Choices.of(only=["epoch"]))
    plan.finish()
    assert live == {"epoch": 7, "rank": 0, "loader": {"at": 0}, "rng": None}
    with pytest.raises(RestoreError, match="differs between the ranks"):
        plan_load(found.header)


def test_the_values_of_one_rank_count_where_it_is_named() -> None:
    states = [{"rank": rank, "w": torch.full((2,), rank), "rng": None} for rank in (0, 1)]
    found = merged(*states, own=1)
    live = {"rank": 9, "w": torch.zeros(2, dtype=torch.int64), "rng": None}
    plan = plan_fill(live, found.header)
    plan.finish()
    assert live["rank"] == 1
    assert [block.rank for block in found.blocks[plan.targets[0].position]] == [1]
    assert not found.replicas


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


def test_a_plain_tensor_of_several_ranks_must_be_one() -> None:
    found = merged(*({"w": torch.zeros(2), "rng": None} for _ in range(3)))
    assert [block.rank for block in found.blocks[0]] == [0]
    assert [block.rank for block in found.replicas[0]] == [1, 2]
    other = merged({"w": torch.zeros(2), "rng": None}, {"w": torch.zeros(3), "rng": None})
    with pytest.raises(RestoreError, match=r"w: is torch.float32 \(2,\) on rank 0 and .*\(3,\)"):
        plan_fill({"w": torch.zeros(2), "rng": None}, other.header)


def test_what_is_not_of_one_kind_is_reported() -> None:
    found = merged({"x": torch.zeros(2), "rng": None}, {"x": 5, "rng": None})
    with pytest.raises(RestoreError, match=r"x: is not of one kind: .* on rank 0, .* on rank 1"):
        plan_fill({"x": 1, "rng": None}, found.header)


def test_the_random_state_of_other_ranks_is_left_out() -> None:
    assert "rng" not in dict(merged({"x": 1}, {"x": 1}).header.tree.entries)
    own = merged({"x": 1}, {"x": 1}, own=0).header.tree
    assert isinstance(own, MapNode)
    assert "rng" in dict(own.entries)


def test_item_says_what_becomes_of_an_entry_on_another_number_of_ranks() -> None:
    states = [
        {
            "loader": {"at": 10 + rank, "seen": torch.full((3,), rank)},
            "seed": rank,
            "scratch": [rank],
            "rng": None,
        }
        for rank in (0, 1)
    ]
    headers = {rank: header_of(make_image(state)[0]) for rank, state in enumerate(states)}

    def live() -> dict[str, Any]:
        return {
            "loader": item(
                {"at": 0, "seen": torch.zeros(3, dtype=torch.int64)}, on_resize="per_rank"
            ),
            "seed": item(99, on_resize="replicate"),
            "scratch": item(["mine"], on_resize="drop"),
            "rng": None,
        }

    for rank in range(3):
        state = live()
        rules = resize_rules(state)
        found = merge_headers(headers, what="test", own=None, rank=rank, rules=rules)
        plan = plan_fill(state, found.header)
        sources = {found.blocks[want.position][0].rank for want in plan.targets}
        plan.finish()
        assert sources == ({rank} if rank < 2 else set())
        assert state["loader"].value["at"] == (10 + rank if rank < 2 else 0), (
            "a new rank keeps its own"
        )
        assert state["seed"].value == 0
        assert state["scratch"].value == ["mine"]
    state = live()
    found = merge_headers(headers, what="test", own=1, rules=resize_rules(state))
    plan_fill(state, found.header).finish()
    assert state["scratch"].value == [1], "as many ranks: each keeps what it had saved"


def test_rules_are_found_wherever_a_wrapper_stands() -> None:
    state = {
        "a": {"b.c": [1, item(2, on_resize="drop")]},
        "d": item({"e": item(3, on_resize="replicate")}),
        "f": {0: item(4, on_resize="per_rank"), object(): 5},
    }
    assert resize_rules(state) == {
        "a.b%2Ec.1": OnResize.DROP,
        "d.e": OnResize.REPLICATE,
        "f.%i0": OnResize.PER_RANK,
    }


def test_what_is_in_conflict_does_not_keep_the_rest_from_being_restored() -> None:
    """Two ranks alike and a third that differs: no replicas are compared of what is no one tensor."""
    states = [{"x": torch.zeros(n), "other": torch.ones(4), "rng": None} for n in (2, 2, 3)]
    found = merged(*states)
    names = {position: found.header.tensors[position].name for position in found.replicas}
    assert set(names.values()) == {"other"}
    live = {"x": torch.zeros(2), "other": torch.zeros(4), "rng": None}
    assert plan_fill(live, found.header, Choices.of(only=["other"])).targets
    with pytest.raises(RestoreError, match=r"x: is torch.float32"):
        plan_fill(live, found.header)
