"""Merging the headers of several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from image_help import header_of, make_image

from tierfall.core.image.merge import MergedHeader, merge_headers
from tierfall.core.load.choices import Choices
from tierfall.core.load.fill import plan_fill
from tierfall.core.types.errors import RestoreError


def merged(*states: Any, own: int | None = None) -> MergedHeader:
    headers = {rank: header_of(make_image(state)[0]) for rank, state in enumerate(states)}
    return merge_headers(headers, what="1@1 of several ranks", own=own)


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
