"""A person's commands to a run of several ranks: every rank makes the call, it is executed once, all get the same
answer."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S, Opener, close_all
from tests.steps import wait_until
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config
from tierfall.core.format.decided import Word
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import RanksError
from tierfall.core.types.values import CheckpointId
from tierfall.run.checkpointer import Checkpointer
from tierfall.tiers.stored import StoredTier


class Nodes(Opener):
    """Ranks on two nodes, each with a disk of its own, and one that both see."""

    node_of = (0, 0, 1)

    def config(self, rank: int, **more: Any) -> Config:
        place = self.folder / str(self.node_of[rank])
        rules = more.pop("rules", {})
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "nvme", "kind": "file", "path": str(place / "nvme"), **rules},
            {
                "name": "pfs",
                "kind": "file",
                "path": str(self.folder / "pfs"),
                "shared": True,
                **rules,
            },
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers, **more})

    def disks(self) -> list[Path]:
        return [self.folder / "0/nvme", self.folder / "1/nvme", self.folder / "pfs"]


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    with network(["a", "a", "b"]) as all_three:
        yield all_three


@pytest.fixture
def nodes(tmp_path: Path, ranks: list[Ranks]) -> Nodes:
    return Nodes(tmp_path, ranks)


def save(ckpts: list[Checkpointer], *steps: int) -> None:
    for step in steps:
        handles = [c.save(step, {"w": torch.full((4,), float(step)), "rng": None}) for c in ckpts]
        for handle in handles:
            handle.wait(timeout=SOON_S)
            handle.wait("nvme", timeout=SOON_S)


def call(ckpts: list[Checkpointer], do: Callable[[Checkpointer], Any]) -> list[Any]:
    return on_all([lambda c=c: do(c) for c in ckpts])  # type: ignore[misc]


def steps_on(disk: Path) -> list[int]:
    return sorted(int(p.parent.name[5:13]) for p in disk.glob("run/step-*/commit.json"))


@contextmanager
def tier_at(place: Path) -> Iterator[StoredTier]:
    store = StoredTier(name="t", run="run", backend=PosixBackend(place))
    try:
        yield store
    finally:
        store.close()


def decide(place: Path, word: Word) -> None:
    """Add an entry about step 1 to the list there, as a command does."""
    with tier_at(place) as store:
        store.decided.add(store.decided.read().next(word, CheckpointId(1, 1), None))


def assert_next_start_leaves(folder: Path, steps: list[int]) -> None:
    """Start anew, restore, and see that every disk comes to hold these steps alone."""
    with network(["a", "a", "b"]) as again:
        nodes = Nodes(folder, again)
        ckpts = nodes.all_open()
        call(ckpts, lambda c: c.restore({"w": torch.zeros(4), "rng": None}))
        assert all(call(ckpts, lambda c: c._session.wait_idle(SOON_S)))
        assert [steps_on(disk) for disk in nodes.disks()] == [steps] * 3
        close_all(ckpts)


def test_what_a_deletion_left_on_one_node_alone_goes_at_the_next_start(
    nodes: Nodes, tmp_path: Path
) -> None:
    """It was killed when all other copies were gone."""
    ckpts = nodes.all_open()
    save(ckpts, 1, 2)
    close_all(ckpts)
    for place in ("0/nvme", "1/nvme", "pfs"):
        decide(tmp_path / place, Word.DELETED)
        if place != "1/nvme":
            with tier_at(tmp_path / place) as store:
                store.delete(CheckpointId(1, 1), attempt=None, known=None)
    assert_next_start_leaves(tmp_path, [2])


def test_a_pin_that_was_left_on_one_node_alone_keeps_the_step_on_all(nodes: Nodes) -> None:
    """As by a command there, of a step that no shared tier has, once the job has read it."""
    ckpts = nodes.all_open(rules={"retain": {"last": 2}})
    save(ckpts, 1)
    decide(nodes.folder / "1/nvme", Word.PIN)
    save(ckpts, 2)
    wait_until(lambda: all(c.checkpoints()[0].pinned for c in ckpts), "it is known")
    save(ckpts, 3, 4)
    wait_until(
        lambda: [steps_on(disk) for disk in nodes.disks()] == [[1, 3, 4]] * 3, "step 2 is gone"
    )
    close_all(ckpts)


def test_a_pin_that_nobody_has_read_yet_keeps_what_lies_on_its_node(nodes: Nodes) -> None:
    ckpts = nodes.all_open(rules={"retain": {"last": 1}})
    save(ckpts, 1)
    decide(nodes.folder / "1/nvme", Word.PIN)
    save(ckpts, 2)
    assert all(call(ckpts, lambda c: c._session.wait_idle(SOON_S)))
    assert steps_on(nodes.folder / "1/nvme") == [1, 2]
    close_all(ckpts)


def test_drain_waits_for_the_shortest_deadline_of_any_rank(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpts = nodes.all_open()
    real, go_on = PosixBackend.create, threading.Event()

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith(".safetensors") and "pfs" in self.place:
            assert go_on.wait(SOON_S)
        return real(self, key, **options)

    monkeypatch.setattr(PosixBackend, "create", create)
    for ckpt in ckpts:
        ckpt.save(1, {"w": torch.ones(4), "rng": None})
    began = time.monotonic()
    reports = on_all(
        [lambda r=r, c=c: c.drain(0.5 if r == 1 else None) for r, c in enumerate(ckpts)]
    )  # type: ignore[misc]
    assert time.monotonic() - began < 5, "without a deadline it takes max_wait, 10 s"
    assert [report.left for report in reports] == [((1, 1, "pfs"),)] * 3
    go_on.set()
    assert [report.left for report in call(ckpts, lambda c: c.drain(SOON_S))] == [()] * 3
    close_all(ckpts)


def test_a_loop_that_ends_by_an_exception_on_one_rank_keeps_the_bounds_of_all(
    nodes: Nodes,
) -> None:
    ckpts = nodes.all_open(max_wait="2s")

    def leave(rank: int) -> None:
        with ckpts[rank]:
            if rank == 1:
                raise ValueError("the loop")
            ckpts[rank].drain(1.0)

    began = time.monotonic()
    outcomes = on_all([lambda r=r: leave(r) for r in range(3)])  # type: ignore[misc]
    assert time.monotonic() - began < 15.0
    assert isinstance(outcomes[1], ValueError)
    assert all(isinstance(outcomes[r], RanksError) for r in (0, 2))
    assert "rank 1 called close: the last step where rank 0 called drain" in str(outcomes[0])


def test_what_was_left_behind_on_one_node_alone_stays_so_for_all_ranks(
    nodes: Nodes, tmp_path: Path
) -> None:
    """Attempt 2 went back from 3@1 to 1@1, and all that it saved is gone; the disk of node ``a`` alone knows of it."""
    ckpts = nodes.all_open()
    save(ckpts, 1, 2, 3)
    close_all(ckpts)
    with network(["a", "a", "b"]) as again:
        ckpts = Nodes(tmp_path, again).all_open(rules={"retain": {"last": 9}})
        state = {"w": torch.zeros(4), "rng": None}
        call(ckpts, lambda c: c.restore(state, step=1))
        call(ckpts, lambda c: c.pin(3, attempt=1))
        save(ckpts, 2)
        close_all(ckpts)
    for disk in nodes.disks():
        shutil.rmtree(disk / "run" / "step-00000002-a0002")
        (disk / "run" / "latest").unlink()
    for disk in nodes.disks()[1:]:
        shutil.rmtree(disk / "run" / "lineage")
    with network(["a", "a", "b"]) as last:
        ckpts = Nodes(tmp_path, last).all_open()
        seen = call(
            ckpts, lambda c: {f"{i.step}@{i.attempt}": i.abandoned for i in c.checkpoints()}
        )
        reports = call(ckpts, lambda c: c.restore({"w": torch.zeros(4), "rng": None}))
        close_all(ckpts)
    assert seen == [{"1@1": False, "3@1": True}] * 3
    assert [report.step for report in reports] == [1, 1, 1]
