"""Replicas: each is written once by one rank, and every rank gets all of them back."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import network
from tests.open_ranks import close_all, kill_all, restore_all
from tests.replica_ranks import (
    MAX_WAIT_S,
    assert_same,
    open_all,
    replica,
    restarted,
    save_all,
    save_whole,
)
from tierfall.core.flush.commits import GroupSeals, TierCommits
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import CaptureError


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    with network(["a", "a", "a"]) as all_ranks:
        yield all_ranks


@pytest.mark.parametrize("wrap", [{"on_resize": "per_rank"}, {"changes": "anytime"}])
def test_what_was_divided_and_is_a_ranks_own_now_comes_back_to_it(
    tmp_path: Path, ranks: list[Ranks], wrap: dict[str, Any]
) -> None:
    def own(value: float) -> dict[str, Any]:
        return {"w": tierfall.item(torch.full((64,), value), **{"changes": "on_step", **wrap})}

    opened = open_all(tmp_path, ranks)
    alike = {"w": tierfall.item(torch.ones(64), changes="on_step")}
    for step, states in enumerate(([alike] * 3, [own(float(rank)) for rank in range(3)]), 1):
        save_whole(opened, step, states)
    fresh = [own(-1.0) for _ in range(3)]
    restore_all(opened, fresh)
    assert [state["w"].value[0].item() for state in fresh] == [0, 1, 2]
    close_all(opened)


def test_what_was_never_compared_is_no_checkpoint_of_the_next_start_either(
    tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    received = threading.Event()
    # they die before rank 0 says anything
    monkeypatch.setattr(GroupSeals, "on_all_complete", lambda *news: received.set())
    monkeypatch.setattr(TierCommits, "on_all_uploaded", lambda *news, **more: received.set())
    opened = open_all(tmp_path, ranks)
    states = [replica(rank, seed=rank) for rank in range(3)]
    handles = save_all(opened, 1, states)
    assert received.wait(MAX_WAIT_S), "all ranks have captured it"
    assert not any(handle.done("host") for handle in handles)
    kill_all(opened)
    monkeypatch.undo()
    with restarted(tmp_path) as (_, _, reports):
        assert reports == [None] * 3


def test_a_rank_that_alone_saves_other_tensors_costs_one_checkpoint(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    opened = open_all(tmp_path, ranks)
    states = [replica(rank) for rank in range(3)]
    save_whole(opened, 1, states)
    del states[1]["optimizer"]
    began = time.monotonic()
    for handle in save_all(opened, 2, states):
        with pytest.raises(CaptureError, match="rank 1 saved other tensors than before"):
            handle.wait(timeout=MAX_WAIT_S)
    assert time.monotonic() - began < MAX_WAIT_S
    save_whole(opened, 3, states)
    assert [info.step for info in opened[0].checkpoints()] == [1, 3]
    close_all(opened)


def test_a_rank_that_does_not_come_to_the_first_save_is_named(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    opened = open_all(tmp_path, ranks)
    states = [replica(rank) for rank in range(3)]
    began = time.monotonic()
    handles = save_all(opened[:2], 1, states[:2])
    assert time.monotonic() - began < 2 * MAX_WAIT_S
    for handle in handles:
        with pytest.raises(CaptureError, match="rank 2 did not save step 1"):
            handle.wait(timeout=3 * MAX_WAIT_S)
    save_whole(opened, 2, states)
    close_all(opened)


def test_a_part_that_another_rank_wrote_is_missed_by_name(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    opened = open_all(tmp_path, ranks)
    states = [replica(rank) for rank in range(3)]
    for step in (1, 2):
        save_whole(opened, step, states)
    close_all(opened)
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    manifest = folder / "rank-00001-of-00003.json"
    assert json.loads(manifest.read_bytes())["pieces"]
    manifest.unlink()
    with restarted(tmp_path) as (_, fresh, reports):
        assert [report.step for report in reports] == [1, 1, 1], reports
        assert_same(fresh, states)


def test_what_ranks_of_a_node_have_in_memory_comes_back_from_there(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    states = [replica(rank) for rank in range(3)]
    opened = open_all(tmp_path, ranks)
    save_whole(opened, 1, states)
    kill_all(opened)
    shutil.rmtree(tmp_path / "disk" / "run" / "step-00000001-a0001")
    with restarted(tmp_path) as (opened, fresh, reports):
        assert [{source.tier for source in report.sources} for report in reports] == [{"host"}] * 3
        assert_same(fresh, states)
        save_whole(opened, 2, fresh)
