"""DCP on several ranks: what one of them cannot do ends the call on all, and what they saved comes back to any number.

The ranks are threads; ``distributed/test_dcp`` has real processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.core.ranks.threads import PATIENCE_S, network, on_all
from tests.integrations.dcp_help import QUIET, Renaming, emptied, same
from tests.integrations.dcp_ranks import Group, let_threads_meet
from tests.test_replicated_tensors import close_all, open_all
from tierfall.integrations.dcp import LazyStager, TierReader, TierWriter
from tierfall.run.checkpointer import Checkpointer

pytestmark = pytest.mark.filterwarnings(QUIET)

State = dict[str, Any]
Call = Callable[["Rank"], Any]


class Rank:
    """One rank: its Checkpointer, and its place among the others in DCP."""

    def __init__(self, number: int, ckpt: Checkpointer, group: Group) -> None:
        self.number = number
        self.ckpt = ckpt
        self.group: Any = group
        self.stager = LazyStager(ckpt)

    def save(self, state: State, step: int, **options: Any) -> None:
        writer = TierWriter(self.ckpt, step=step, until="disk")
        dcp.save(state, storage_writer=writer, process_group=self.group, **options)

    def save_lazily(self, state: State, step: int, **options: Any) -> None:
        future = dcp.async_save(
            state,
            storage_writer=TierWriter(self.ckpt, step=step, until="disk"),
            async_stager=self.stager,
            process_group=self.group,
            **options,
        )
        future.result(PATIENCE_S)  # type: ignore[union-attr]

    def load(self, state: State, **options: Any) -> State:
        reader = TierReader(self.ckpt, **options)
        dcp.load(state, storage_reader=reader, process_group=self.group)
        return state

    def steps(self) -> list[int]:
        return [c.step for c in self.ckpt.checkpoints()]


@contextmanager
def job(folder: Path, world_size: int, **disk: Any) -> Iterator[list[Rank]]:
    with network(["a"] * world_size) as ranks:
        opened = open_all(folder, ranks, **disk)
        groups = Group.of(world_size)
        yield [Rank(n, c, g) for n, (c, g) in enumerate(zip(opened, groups, strict=True))]
        close_all(opened)


@pytest.fixture(autouse=True)
def _threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    let_threads_meet(monkeypatch)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Rank]]:
    with job(tmp_path, 2) as ranks:
        yield ranks


def on(ranks: list[Rank], call: Call) -> list[Any]:
    """Make a call on all ranks; what each returned or raised."""
    return on_all([lambda r=rank: call(r) for rank in ranks])  # type: ignore[misc]


class Failing(DefaultSavePlanner):
    """Has no plan."""

    def create_local_plan(self) -> Any:
        raise ValueError("this rank cannot plan")


# Failures --------------------------------------------------------------------------------------------


def all_are_told(answers: list[Any], output: str) -> None:
    for answer in answers:
        assert isinstance(answer, CheckpointException), answer
        assert output in str(answer)


@pytest.mark.parametrize("lazy", [False, True])
def test_what_one_rank_cannot_save_is_raised_by_all_and_the_next_step_is_saved(
    pair: list[Rank], lazy: bool
) -> None:
    def save(rank: Rank, step: int, value: Any) -> None:
        how = rank.save_lazily if lazy else rank.save
        how({"w": torch.ones(5), "value": value}, step)

    answers = on(pair, lambda rank: save(rank, 1, print if rank.number == 1 else 1))
    all_are_told(answers, "value")
    assert on(pair, lambda rank: save(rank, 2, 1)) == [None, None]
    assert on(pair, Rank.steps) == [[2], [2]]


def test_a_rank_that_cannot_plan_ends_the_save_for_all_and_nothing_is_saved(
    pair: list[Rank],
) -> None:
    state = {"w": torch.ones(5)}
    answers = on(
        pair, lambda rank: rank.save(state, 1, planner=Failing() if rank.number == 1 else None)
    )
    all_are_told(answers, "this rank cannot plan")
    assert on(pair, lambda rank: rank.save(state, 2)) == [None, None]
    assert on(pair, Rank.steps) == [[2], [2]]


@pytest.mark.parametrize(
    ("planner", "ranks", "output"),
    [(Failing, [1], "this rank cannot plan"), (Renaming, [0, 1], "xw is planned as")],
)
def test_what_was_captured_before_dcp_failed_to_plan_is_a_checkpoint_of_the_state(
    pair: list[Rank], planner: type[DefaultSavePlanner], ranks: list[int], output: str
) -> None:
    def state(rank: Rank) -> State:
        return {"w": torch.full((5,), 7.0), "own": rank.number}

    answers = on(
        pair,
        lambda rank: rank.save_lazily(
            state(rank), 1, planner=planner() if rank.number in ranks else None
        ),
    )
    all_are_told(answers, output)
    assert on(pair, lambda rank: rank.save_lazily(state(rank), 2)) == [None, None]
    assert on(pair, Rank.steps) == [[1, 2], [1, 2]]
    on(pair, lambda rank: rank.ckpt.drain())  # threads have no process group to send shards by
    found = on(pair, lambda rank: rank.load(emptied(state(rank)), step=1, resume=False))
    assert all(same(one, state(rank)) for rank, one in zip(pair, found, strict=True))


# What comes back -------------------------------------------------------------------------------------


def test_values_under_one_key_are_each_ranks_own(tmp_path: Path) -> None:
    """DCP takes them for replicas, and plans one of them."""

    def state(number: int) -> State:
        return {"rng": {"seed": 100 + number, "at": [number]}, "w": torch.arange(6.0)}

    with job(tmp_path, 2) as pair:
        assert on(pair, lambda rank: rank.save(state(rank.number), 1)) == [None, None]
        found = on(pair, lambda rank: rank.load(emptied(state(0))))
        assert all(same(one, state(number)) for number, one in enumerate(found))
    with job(tmp_path, 1) as (one,):
        output = r"rng\.seed: differs between the ranks that saved it: 100 on rank 0; 101 on rank 1"
        with pytest.raises(CheckpointException, match=output):
            one.load(emptied(state(0)))
        assert same(one.load(emptied(state(0)), values_of=1), state(1))


def test_a_step_that_lacks_another_ranks_image_gives_way_to_an_older_one(tmp_path: Path) -> None:
    """A load needs the headers of all ranks' images."""

    def state(number: int, step: int) -> State:
        return {f"w{number}": torch.full((4,), float(step)), "own": number}

    with job(tmp_path, 3) as ranks:
        for step in (1, 2):
            assert on(ranks, lambda r, s=step: r.save(state(r.number, s), s)) == [None] * 3
    shutil.rmtree(tmp_path / "memory")
    for manifest in tmp_path.glob("disk/run/step-00000002-*/rank-0000[01]-of-00003.json"):
        manifest.unlink()
    with job(tmp_path, 1) as (one,):
        found = one.load({**emptied(state(0, 0)), "w1": torch.zeros(4)}, values_of=2)
        assert same(found, {**state(0, 1), **state(1, 1), "own": 2})


def test_what_all_ranks_have_opened_stays_until_they_have_read_it(tmp_path: Path) -> None:
    def state(step: int) -> State:
        return {"w": torch.full((50_000,), float(step))}

    def load(rank: Rank) -> State:
        class Slow(TierReader):
            def set_up_storage_reader(self, *given: Any, **named: Any) -> None:
                for step in (2, 3, 4):
                    rank.save(state(step), step)
                rank.ckpt.prune()
                assert 1 in on_disk(rank)

        reader: Any = Slow(rank.ckpt, step=1, resume=False)
        found = state(0)
        dcp.load(found, storage_reader=reader, process_group=rank.group)
        rank.ckpt.drain(PATIENCE_S)
        return found

    with job(tmp_path, 2, retain={"last": 1}) as pair:
        on(pair, lambda rank: rank.save(state(1), 1))
        found = on(pair, load)
        assert all(same(one, state(1)) for one in found), found
        on(pair, lambda rank: rank.ckpt.prune())
        assert on(pair, on_disk) == [[4], [4]]


def on_disk(rank: Rank) -> list[int]:
    return [c.step for c in rank.ckpt.checkpoints() if "disk" in c.copies]
