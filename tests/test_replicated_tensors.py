"""Replicas: each is written once by one rank, and every rank gets all of them back."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from typer.testing import CliRunner

import tierfall
from tests.contract.kit import equal
from tests.core.ranks.threads import network, on_all
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
from tierfall.cli.app import app
from tierfall.core.capture import capturer
from tierfall.core.flush.commits import GroupSeals, TierCommits
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import CaptureError
from tierfall.core.types.values import SaveOutcome


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


def uneven(seed: int) -> dict[str, Any]:
    """Replicas with one tensor that is most of the state, and such as cannot be divided, or hardly."""
    torch.manual_seed(seed)
    model = nn.Embedding(3000, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(3000)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    deep = nn.Parameter(torch.randn(2, 20, 100, 300))
    own = {"deep": deep, "tied": deep, "turned": nn.Parameter(torch.randn(50, 60).t())}
    scale = nn.Parameter(torch.randn(()))
    return {"model": model, "optimizer": optimizer, "own": own, "scale": scale}


def flat(state: dict[str, Any]) -> list[Any]:
    modules = [state["model"].state_dict(), state["optimizer"].state_dict()]
    return [*modules, state["own"], state["scale"]]


def test_ranks_write_equally_many_bytes_of_a_state_with_one_large_tensor(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    """Each rank has a part of it then, and it comes back onto any number of ranks, and in other ways."""

    def restore(count: int) -> list[set[str]]:
        with network(["a"] * count) as again:
            opened = open_all(tmp_path, again, chunk="64KiB")
            states = [uneven(2 + rank) for rank in range(count)]
            reports = restore_all(opened, states)
            close_all(opened)
        assert all(equal(flat(state), flat(expected)) for state in states)
        assert all(state["own"]["tied"] is state["own"]["deep"] for state in states)
        return [{source.tier for source in report.sources} for report in reports]

    expected = uneven(1)
    opened = open_all(tmp_path, ranks, chunk="64KiB")
    for step in (1, 2):
        save_whole(opened, step, [uneven(1) for _ in ranks])
    kill_all(opened)
    folder = tmp_path / "disk" / "run" / "step-00000002-a0001"
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= max(64 << 10, 0.02 * max(sizes)), sizes
    assert restore(3) == [{"host"}] * 3
    shutil.rmtree(tmp_path / "memory")
    assert restore(3) == restore(2) + restore(1) == [{"disk"}] * 3
    loaded = tierfall.load(tmp_path / "disk" / "run")
    assert torch.equal(loaded["own"]["deep"], expected["own"]["deep"])
    assert loaded["own"]["tied"] is loaded["own"]["deep"]
    target = tmp_path / "exported.safetensors"
    words = ["export", "2", "--config", str(tmp_path / "disk"), "--to", str(target)]
    assert CliRunner().invoke(app, words).exit_code == 0
    with safe_open(target, "pt") as exported:
        assert torch.equal(exported.get_tensor("own.deep"), expected["own"]["deep"])
        assert torch.equal(exported.get_tensor("model.weight"), expected["model"].weight)


def test_a_divided_tensor_that_gets_gaps_in_memory_is_saved_on(
    tmp_path: Path, ranks: list[Ranks]
) -> None:
    """And NaN in a part of one is noted, by the tensor's name."""
    states = [{"w": nn.Parameter(torch.ones(3000, 100))} for _ in ranks]
    opened = open_all(tmp_path, ranks, chunk="64KiB")
    save_whole(opened, 1, states)
    for state in states:
        state["w"].data = torch.ones(3000, 200)[:, :100]
    save_whole(opened, 2, states)
    for state in states:
        state["w"].data = torch.full((3000, 100), float("nan"))
    save_whole(opened, 3, states)
    assert [info.not_finite for info in opened[0].checkpoints()] == [(), (), ("w",)]
    fresh = [{"w": nn.Parameter(torch.zeros(3000, 100))} for _ in ranks]
    close_all(opened)
    with network(["a"] * 3) as again:
        opened = open_all(tmp_path, again)
        assert [report.step for report in restore_all(opened, fresh)] == [2] * 3
        close_all(opened)
    assert all(torch.equal(state["w"], torch.ones(3000, 100)) for state in fresh)


# Replicas that become different after their writers were assigned -----------------------------------


State = dict[str, Any]
UNLIKE = "not replicas of one"


@pytest.fixture(autouse=True)
def nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread of a test is a barrier: what is captured lazily is sealed sooner."""
    monkeypatch.setattr(capturer, "SETTLED_S", 0.05)


def train(state: State, seed: int) -> None:
    """One step on a batch of its own seed."""
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    state["model"](batch).pow(2).mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def refused(handles: list[Any], match: str = UNLIKE) -> None:
    for handle in handles:
        with pytest.raises(CaptureError, match=match):
            handle.wait(timeout=MAX_WAIT_S)
        assert handle.outcome is SaveOutcome.FAILED
        assert not handle.done("host")


def written(folder: Path, step: int, name: str = "model.0.weight") -> int:
    """Say how many ranks wrote a tensor."""
    count = 0
    for path in (folder / "disk" / "run" / f"step-{step:08d}-a0001").glob("*.safetensors"):
        with safe_open(path, "pt") as image:
            count += name in image.keys()  # noqa: SIM118 - it is no mapping
    return count


def _tensors(state: State) -> list[torch.Tensor]:
    held = [t for s in state["optimizer"].state.values() for t in s.values()]
    return [*state["model"].parameters(), *held]


class LocalSGD:
    """Replicas that train apart, and exchange their parameters every three steps; what the inner optimizer has stays
    with each."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], wrap: str) -> None:
        self.states = []
        for rank in range(3):
            torch.manual_seed(rank + 10)
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            self.states.append({"model": model, "optimizer": make(model.parameters())})
        self.wrap = wrap
        self.exchange()

    def exchange(self) -> None:
        with torch.no_grad():
            for same in zip(*(s["model"].parameters() for s in self.states), strict=True):
                mean = torch.stack(same).mean(0)
                for one in same:
                    one.copy_(mean)

    def step(self, number: int) -> None:
        for rank, state in enumerate(self.states):
            train(state, 10 * number + rank)
        if number % 3 == 0:
            self.exchange()

    def given(self) -> list[State]:
        own = {"none": (), "optimizer": ("optimizer",), "all": ("optimizer", "model")}[self.wrap]
        return [
            {k: tierfall.item(v, on_resize="per_rank") if k in own else v for k, v in s.items()}
            for s in self.states
        ]

    def now(self) -> list[list[torch.Tensor]]:
        return [[t.detach().clone() for t in _tensors(state)] for state in self.states]


def assert_comes_back(
    opened: list[Any], step: int, fresh: LocalSGD, had: list[list[torch.Tensor]]
) -> None:
    """Restore a step on all ranks, and compare what each gets with what it had."""
    calls = zip(opened, fresh.given(), strict=True)
    reports = on_all([lambda c=c, s=s: c.restore(s, step=step) for c, s in calls])  # type: ignore[misc]
    assert [report.step for report in reports] == [step] * len(opened)
    for expected, found in zip(had, fresh.now(), strict=True):
        assert all(map(torch.equal, expected, found)), f"step {step}"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "wrap", "first", "failed", "copies"),
    [
        (sgd, "none", 1, [1], 3),
        (adam, "none", 3, [3], 3),
        (adam, "optimizer", 3, [], 1),
    ],
)
def test_a_local_sgd_loop_gets_back_what_each_rank_had_at_each_step_that_was_saved(
    make: Any,
    wrap: str,
    first: int,
    failed: list[int],
    copies: int,
    tmp_path: Path,
    ranks: list[Ranks],
) -> None:
    loop = LocalSGD(make, wrap)
    opened = open_all(tmp_path, ranks)
    had: dict[int, list[list[torch.Tensor]]] = {}
    for number in range(1, 12):
        loop.step(number)
        if number % 3 == first % 3:
            handles = save_all(opened, number, loop.given())
            if number in failed:
                refused(handles)
                continue
            for handle in handles:
                handle.wait(timeout=MAX_WAIT_S)
            had[number] = loop.now()
    last = max(had)
    assert written(tmp_path, last) == copies
    assert len(had) + len(failed) == len(range(first, 12, 3))
    fresh = LocalSGD(make, wrap)
    for step, tensors in had.items():
        assert_comes_back(opened, step, fresh, tensors)
    close_all(opened)


def test_after_a_start_all_is_compared_again(tmp_path: Path, ranks: list[Ranks]) -> None:
    states = [replica(rank) for rank in range(3)]
    opened = open_all(tmp_path, ranks)
    save_whole(opened, 1, states)
    for rank, state in enumerate(states):
        train(state, rank)
    refused(save_all(opened, 2, states))
    save_whole(opened, 3, states)
    kill_all(opened)
    with restarted(tmp_path) as (opened, fresh, reports):
        assert [report.step for report in reports] == [3, 3, 3]
        assert_same(fresh, states)
        refused(save_all(opened, 4, fresh))
        save_whole(opened, 5, fresh)
        opened_at = [info.step for info in opened[0].checkpoints()]
        assert opened_at == [1, 3, 5]
